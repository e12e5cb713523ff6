"""The claims about the GPU: each with its target, and its result in a run."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from loadtest import record

HEADINGS = ("section", "claim", "target", "result")
NOT_RUN = "not run yet"
TESTS = (
    ("kernel", "tests of test_gpu_preprocessor.py"),
    ("server", "tests of test_onnxruntime.py"),
    ("server", "tests of test_server_on_gpu.py"),
    ("server", "tests of test_cuda_shared_memory.py"),
)

Results = Mapping[str, Any]


class Claim(NamedTuple):
    """A statement about the GPU path.

    `read` returns the measured value from the results of its section; a missing key means that the value
    was not measured. `holds` compares the value with the target; without a target, there is none.
    """

    section: str
    text: str
    target: str
    read: Callable[[Results], Any]
    holds: Callable[[Any], bool] | None = None


def _tests(name: str) -> Callable[[Results], Any]:
    def read(found: Results) -> str:
        each = found[name]
        words = [f"{each[key]} {key}" for key in ("passed", "failed", "skipped")]
        return ", ".join([*words, *["stopped"] * ("stopped_after_s" in each)])

    return read


def _passed(text: str) -> bool:
    return not text.startswith("0 ") and ", 0 failed" in text and "stopped" not in text


def _at_most(limit: float) -> Callable[[Any], bool]:
    return lambda value: bool(value <= limit)


def _at_least(limit: float) -> Callable[[Any], bool]:
    return lambda value: bool(value >= limit)


def _is_true(value: Any) -> bool:
    return value is True


def _is_none_found(value: Any) -> bool:
    return bool(value == [] or value == 0)


def _form(name: str, key: str) -> Callable[[Results], Any]:
    def read(found: Results) -> Any:
        each = found["forms"][name]
        parts = [part[key] for part in each.values() if isinstance(part, dict)]
        if not parts:
            return f"not run: {each['missing']}" if "missing" in each else f"failed: {each['error']}"
        return all(parts) if isinstance(parts[0], bool) else max(parts)

    return read


def _engines(key: str) -> Callable[[Results], Any]:
    """Read a value of the second load with TensorRT, or the reason why there is none."""

    def read(found: Results) -> Any:
        each = found["engines"]
        if "missing" in each:
            return f"not run: {each['missing']}"
        return each["are_reused"] if key == "are_reused" else each["loads"][-1][key]

    return read


def _changing(key: str) -> Callable[[Results], Any]:
    return lambda found: found["changing"][key]


def _is_reused(value: Any) -> bool:
    return value is True or (isinstance(value, str) and value.startswith("not run"))


def _difference(limit: float) -> Callable[[Any], bool]:
    def holds(value: Any) -> bool:
        return value.startswith("not run") if isinstance(value, str) else bool(value <= limit)

    return holds


def _alone(found: Results) -> bool:
    each = found["alone"]
    return bool(each["good_row_unchanged"] and each["failed"] == each["damaged"])


def _served_alone_ms(found: Results) -> Any:
    return next(row["p50_ms"] for row in found["served"] if row["in_flight"] == 1)


CLAIMS = (
    *(
        Claim(section, f"`tests/gpu/{name.removeprefix('tests of ')}`", "no failure", _tests(name), _passed)
        for section, name in TESTS
    ),
    Claim(
        "kernel",
        "kernel and CPU path: largest mean difference of a row, in levels of 255",
        "≤ 1.0",
        lambda found: found["against_cpu_path"]["worst_mean"],
        _at_most(1.0),
    ),
    Claim(
        "kernel",
        "kernel and Pillow: largest mean difference of a row, in levels of 255",
        "≤ 0.6",
        lambda found: found["against_pillow"]["worst_mean"],
        _at_most(0.6),
    ),
    Claim(
        "decoder",
        "nvImageCodec with the kernel, and CPU path: largest mean difference, in levels of 255",
        "≤ 1.0",
        lambda found: found["worst_mean"],
        _at_most(1.0),
    ),
    Claim(
        "decoder",
        "kinds of files that the wrong decoder decodes",
        "none",
        lambda found: found["unexpected_fallbacks"],
        _is_none_found,
    ),
    Claim(
        "decoder",
        "files with another error than on the CPU path",
        "none",
        lambda found: found["unexpected_errors"],
        _is_none_found,
    ),
    Claim("decoder", "damaged files fail alone", "True", _alone, _is_true),
    Claim(
        "decoder",
        "photos that the host decodes",
        "0",
        lambda found: found["fallbacks_of_photos"],
        _is_none_found,
    ),
    Claim(
        "zero_copy",
        "the network reads the tensor where preprocessing wrote it: equal addresses",
        "True",
        lambda found: found["addresses"]["are_equal"],
        _is_true,
    ),
    Claim(
        "zero_copy",
        "copies from device to host in 20 batches of 32, from JPEG to scores",
        "0",
        lambda found: found["to_host"]["count"],
        _is_none_found,
    ),
    Claim(
        "zero_copy",
        "bytes of these copies; a row of the tensor has 602,112",
        "0",
        lambda found: found["to_host"]["bytes"],
        _is_none_found,
    ),
    Claim(
        "server",
        "the Python backend in the wheel is built with CUDA",
        "True",
        lambda found: found["python_backend_has_cuda_code"],
        _is_true,
    ),
    Claim(
        "server",
        "the embedded server starts preprocessing and network on the GPU",
        "KIND_GPU",
        lambda found: ", ".join(sorted({kind for each in found["instances"].values() for kind in each})),
        lambda value: value == "KIND_GPU",
    ),
    Claim(
        "server",
        "processes of each step and version on the GPU",
        "2",
        lambda found: ", ".join(map(str, sorted(set(found["processes"].values())))),
        lambda value: value == "2",
    ),
    Claim(
        "server",
        "the Python backend passes tensors on without the host: inputs through the host",
        "0",
        lambda found: found["inputs_through_host"],
        _is_none_found,
    ),
    Claim(
        "server",
        "the same counter after one tensor from a client, which proves that it counts",
        "1",
        lambda found: found["counted_of_one_tensor_sent"],
        lambda value: bool(value == 1),
    ),
    Claim(
        "server",
        "classes of the coffee photo",
        "espresso",
        lambda found: ", ".join(found["classes"]),
        lambda value: value == "espresso",
    ),
    Claim(
        "speed",
        "JPEG of 1080p to scores through the server, one request at a time: p50 in ms",
        "≤ 3",
        _served_alone_ms,
        _at_most(3.0),
    ),
    Claim(
        "speed",
        "JPEG of 1080p to scores in one process: p50 in ms",
        "≤ 3",
        lambda found: found["in_process"][0]["p50_ms"],
        _at_most(3.0),
    ),
    Claim(
        "speed",
        "best rate of the server, as a share of min(decoder, network)",
        "≥ 0.8",
        lambda found: found["served_to_slower_step"],
        _at_least(0.8),
    ),
    Claim(
        "speed",
        "best rate of the server in images of 1080p per second",
        "",
        lambda found: max(row["per_s"] for row in found["served"] if not row["failed"]),
    ),
    *(
        Claim(
            "precisions",
            f"{name} and the network on the CPU: largest difference of a score",
            f"≤ {limit:g}",
            _form(name, "max_difference"),
            _difference(limit),
        )
        for name, limit in (
            ("FP32", 0.01),
            ("FP32, CUDA graph", 0.01),
            ("FP16", 0.02),
            ("INT8", 0.05),
            ("TensorRT FP32", 0.01),
            ("TensorRT FP16", 0.02),
        )
    ),
    Claim(
        "precisions",
        "CUDA graphs of several batch sizes in the backend: largest difference of a score",
        "≤ 0.01",
        lambda found: found["recorded"]["max_difference"],
        _at_most(0.01),
    ),
    Claim(
        "precisions",
        "a second load with TensorRT reads the engine of the first, which serves all batch sizes",
        "True",
        _engines("are_reused"),
        _is_reused,
    ),
    Claim("precisions", "seconds of this second load", "", _engines("seconds")),
    *(
        Claim(
            "precisions",
            f"run of another batch size than the one before, {words} CUDA graphs: median in ms",
            "",
            _changing(f"{words}_graphs_ms"),
        )
        for words in ("without", "with")
    ),
    Claim(
        "memory",
        "a batch that exceeds `gpu_mem_limit` is run in halves: largest difference of a score",
        "≤ 0.01",
        lambda found: found["halves"].get("max_difference", "no limit led to halves"),
        lambda value: not isinstance(value, str) and value <= 0.01,
    ),
    Claim(
        "memory",
        "memory of the GPU for the server with its default models, in MiB",
        "",
        lambda found: found["after_requests_mib"],
    ),
    Claim(
        "memory",
        "memory after unload and load, in MiB more than before",
        "≤ 64",
        lambda found: found["after_load_mib"] - found["after_requests_mib"],
        _at_most(64),
    ),
    Claim(
        "memory",
        "memory that the stopped server keeps, in MiB",
        "0",
        lambda found: found["after_stop_mib"],
        _at_most(0),
    ),
    Claim(
        "memory",
        "right answers after the GPU's memory was full, without a restart",
        "True",
        lambda found: found["is_right_after_full"] and found["server_runs"],
        _is_true,
    ),
    Claim(
        "speed",
        "best rate of the server, as a multiple of the best service by hand",
        "≥ 3",
        lambda found: found["served_to_by_hand"],
        _at_least(3.0),
    ),
    Claim(
        "pipeline",
        "JPEG of 1080p to scores as the profile `gpu` computes it, without a server: p50 in ms",
        "≤ 3",
        lambda found: found["alone"]["1"]["p50_ms"],
        _at_most(3.0),
    ),
    Claim(
        "pipeline",
        "best rate of overlapping batches, in images of 1080p per second",
        "",
        lambda found: max(found["overlapped_per_s"].values()),
    ),
    Claim(
        "pipeline",
        "images of mixed overlapping batches with another result than alone",
        "0",
        lambda found: found["wrong_in_mixed_batches"],
        _is_none_found,
    ),
    Claim(
        "pipeline",
        "bytes that overlapping batches copy to the host in addition to the scores",
        "0",
        lambda found: found["bytes_to_host_but_scores"],
        _is_none_found,
    ),
    Claim(
        "processor",
        "best rate of the profile `cpu` on the same machine, in images of 1080p per second",
        "",
        lambda found: found["best_per_s"],
    ),
)


def rows(sections: Mapping[str, Any]) -> list[record.Row]:
    """Return a row per claim with its result: the value, `(missed)`, or the status of the section."""
    return [
        {
            "section": claim.section,
            "claim": claim.text,
            "target": claim.target,
            "result": _result(claim, sections.get(claim.section)),
        }
        for claim in CLAIMS
    ]


def missed(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name the claims whose targets were missed."""
    return [
        f"target missed: {row['claim']}: {row['target']}, got {row['result']}"
        for row in found
        if row["result"].endswith(" (missed)")
    ]


def markdown(found: Iterable[Mapping[str, Any]]) -> str:
    """Render the table of docs/gpu.md."""
    return record.markdown(HEADINGS, ([row[name] for name in HEADINGS] for row in found))


def _result(claim: Claim, section: Mapping[str, Any] | None) -> str:
    if section is None or section["status"] == "not reached":
        return NOT_RUN
    try:
        value = claim.read(section["results"])
    except (KeyError, StopIteration, ValueError, IndexError):
        return NOT_RUN if section["status"] == "done" else f"{NOT_RUN}: {section['status']}"
    if value is None:
        return NOT_RUN
    text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
    return text if claim.holds is None or claim.holds(value) else f"{text} (missed)"

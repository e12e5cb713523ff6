"""The claims about the GPU with their targets, and their results in a run.

`python -m loadtest.gpu_check.claims` writes the table of docs/gpu_results.md from the record.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from loadtest import record
from loadtest.gpu_check.tests import FILES

HEADINGS = ("section", "claim", "target", "result")
NOT_RUN = "not run yet"
NO_FAILURE = "no failure"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu_results.md"
RECORD = record.RESULTS / "gpu_check.json"
MARK = "<!-- claims: written by make docs -->\n\n"

# Keys of a result from the section on, or a quotient of two; the claim; its target, or a number without one.
CLAIMS = (
    ("machine.python_backend_has_cuda_code", "the Python backend in the wheel is built with CUDA", "= True"),
    ("speed.bound_p50_ms", "JPEG of 1080p to scores as the profile `gpu` computes it: p50 in ms", "≤ 3"),
    ("speed.unbound_p50_ms", "the same with unbound networks, as in `gpu_ensemble`: p50 in ms", "≤ 3"),
    ("speed.best_overlapped_per_s", "best rate of overlapping batches, in images of 1080p per second", ""),
    ("speed.wrong_in_mixed_batches", "images of mixed batches with another result than alone", "= 0"),
    ("speed.decoded_by_the_host", "photos that the host decodes", "= 0"),
    ("served.alone_p50_ms", "JPEG of 1080p to scores through the server, one by one: p50 in ms", "≤ 3"),
    ("served.best_per_s", "best rate of the server, in images of 1080p per second", ""),
    ("served.best_per_s / speed.slower_step_per_s", "this rate as a share of min(decoder, network)", "≥ 0.8"),
    (
        "served.best_per_s / served.best_by_hand_per_s",
        "this rate as a multiple of the service by hand",
        "≥ 3",
    ),
    ("served.best_cpu_per_s", "best rate of the profile `cpu` on the same machine", ""),
    ("zero_copy.unbound_copies_to_host", "copies to the host in 20 batches of 32, unbound", "= 0"),
    ("zero_copy.bound_bytes_to_host_but_scores", "bytes to the host besides the scores, overlapping", "= 0"),
    *((f"tests.{name}.summary", f"`tests/gpu/{name}.py`", NO_FAILURE) for name in FILES),
    ("memory.after_requests_mib", "memory of the server with its default models, in MiB", "≤ 2560"),
    ("memory.grown_mib", "memory after unload and load, in MiB more than before", "≤ 64"),
    ("memory.after_stop_mib", "memory that the stopped server keeps, in MiB", "≤ 0"),
    ("memory.is_right_after_full", "right answers after the memory was full, without a restart", "= True"),
    *(
        (f"precisions.max_difference.{name}", f"{name} and the CPU: largest difference of a score", target)
        for name, target in (
            *(("FP32", "≤ 0.01"), ("FP32, CUDA graph", "≤ 0.01"), ("FP16", "≤ 0.02")),
            *(("INT8", "≤ 0.05"), ("TensorRT FP32", "≤ 0.01"), ("TensorRT FP16", "≤ 0.02")),
        )
    ),
)


def holds(target: str, value: Any) -> bool:
    """Compare a value with its target; a text that begins with `not run` misses none."""
    if not target or str(value).startswith("not run"):
        return True
    if target == NO_FAILURE:
        return bool(re.search(r"\b[1-9]\d* passed", value)) and not re.search(
            r"\b[1-9]\d* (failed|error)|stopped", value
        )
    operator, bound = target.split()
    if operator == "=":
        return str(value) == bound
    if isinstance(value, str):
        return False
    return bool(value <= float(bound) if operator == "≤" else value >= float(bound))


def rows(sections: Mapping[str, Any]) -> list[record.Row]:
    """Return a row per claim with its result: the value, `(missed)`, or the status of the section."""
    claims = [
        (path.partition(".")[0], text, target, _result(path, target, sections))
        for path, text, target in CLAIMS
    ]
    return [dict(zip(HEADINGS, claim, strict=True)) for claim in claims]


def missed(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Name the claims whose targets were missed."""
    return [
        f"target missed: {row['claim']}: {row['target']}, got {row['result']}"
        for row in found
        if row["result"].endswith(" (missed)")
    ]


def render(recorded: Mapping[str, Any]) -> str:
    """Return the page with the table of a record."""
    cells = ([row[name] for name in HEADINGS] for row in rows(recorded["sections"]))
    return record.with_section(
        PAGE.read_text(), MARK, f"{_conditions(recorded)}\n\n{record.markdown(HEADINGS, cells)}"
    )


def _result(path: str, target: str, sections: Mapping[str, Any]) -> str:
    try:
        values = [_value(part, sections) for part in path.split(" / ")]
        value = values[0] if len(values) == 1 else round(values[0] / values[1], 3)
    except (KeyError, ZeroDivisionError):
        status = sections.get(path.partition(".")[0], {}).get("status", "done")
        return NOT_RUN if status in ("done", "not reached") else f"{NOT_RUN}: {status}"
    text = str(value).partition("; its output ends")[0]
    return text if holds(target, value) else f"{text} (missed)"


def _value(path: str, sections: Mapping[str, Any]) -> Any:
    section, *keys = path.split(".")
    value = sections[section]["results"]
    for key in keys:
        value = value[key]
    return value


def _conditions(recorded: Mapping[str, Any]) -> str:
    gpus = recorded["sections"].get("machine", {}).get("results", {}).get("gpus", [])
    names = ", ".join(f"{gpu['name']}, driver {gpu['driver']}" for gpu in gpus) or "unknown GPU"
    link = f"[{RECORD.name}](../loadtest/results/{RECORD.name})"
    by_commit: dict[str, list[str]] = {}
    for name, section in recorded["sections"].items():
        by_commit.setdefault(section.get("commit", recorded["commit"]), []).append(name)
    commits = "; ".join(f"{commit}: {', '.join(names)}" for commit, names in by_commit.items())
    about = f"{names}; {recorded['machine']['cpu']}; {recorded['date'][:10]}"
    return f"{link}: {about}; `{recorded['command']}`. Sections by commit: {commits}."


if __name__ == "__main__":
    PAGE.write_text(render(json.loads(RECORD.read_text())))

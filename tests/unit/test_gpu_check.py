"""Results of the GPU check: outputs of other programs, verdicts, and the claims of docs/gpu.md.

The outputs below are samples of the formats, written after NVIDIA's and PyTorch's documentation. They are
not from a GPU of this project.
"""

import json
import os
import sys
from dataclasses import asdict

import numpy as np
import pytest

from loadtest.gpu_check import (
    chain,
    claims,
    decoder,
    full_gpu,
    gpu_tests,
    kernel,
    machine,
    memory,
    page,
    served,
    server,
    speed,
    traces,
    zero_copy,
)
from nereid.server.gpu import nvidia_smi
from nereid.tune.load_generator import Load
from tests import gpu_outputs

PREPROCESSOR = f"tests of {kernel.TEST_FILE}"
REPORT = """<testsuites><testsuite name="pytest" errors="0" failures="1" skipped="1" tests="3">
<testcase name="test_rows[imagenet]"/>
<testcase name="test_bad_image"><failure message="assert 2.5 &lt;= 1.0">trace</failure></testcase>
<testcase name="test_region"><skipped message="needs libcudart"/></testcase>
</testsuite></testsuites>"""
# `nsys stats --report cuda_gpu_mem_size_sum --format csv`.
NSYS = """
Processing [trace.sqlite] with [cuda_gpu_mem_size_sum.py]...

Total (MB),Count,Avg (MB),Med (MB),Min (MB),Max (MB),StdDev (MB),Operation
"1,965.536",640,0.102,0.102,0.000,0.105,0.001,[CUDA memcpy Host-to-Device]
0.004,20,0.000,0.000,0.000,0.000,0.000,[CUDA memcpy Device-to-Host]
0.131,2,0.066,0.066,0.066,0.066,0.000,[CUDA memset]

"""
# The trace that `torch.profiler` exports for Chrome.
PROFILER = json.dumps(
    {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "preprocess", "ts": 1, "dur": 5},
            {
                "ph": "X",
                "cat": "gpu_memcpy",
                "name": "Memcpy HtoD (Pinned -> Device)",
                "args": {"bytes": 4096},
            },
            {
                "ph": "X",
                "cat": "gpu_memcpy",
                "name": "Memcpy HtoD (Pageable -> Device)",
                "args": {"bytes": 1},
            },
            {
                "ph": "X",
                "cat": "gpu_memcpy",
                "name": "Memcpy DtoH (Device -> Pageable)",
                "args": {"bytes": 64},
            },
            {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "args": {"bytes": 9}},
        ]
    }
)
LDD = """
	linux-vdso.so.1 (0x00007ffc)
	libcublasLt.so.12 => not found
	libcudnn.so.9 => not found
	libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)
"""
METRICS = """# TYPE nereid_onnxruntime_host_inputs_total counter
nereid_onnxruntime_host_inputs_total{model="a",version="1"} 3
nereid_onnxruntime_host_inputs_total{model="a",version="2"} 4
"""


def test_outcomes_of_tests_are_read():
    """Numbers, the message of the failure, and the reason to skip."""
    assert gpu_tests.outcomes(REPORT) == {
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "failures": {"test_bad_image": "assert 2.5 <= 1.0"},
        "reasons_to_skip": ["needs libcudart"],
    }


def test_missing_libraries_are_read():
    """Only the lines of `ldd` that end with `not found`."""
    assert machine.unresolved(LDD) == ["libcublasLt.so.12", "libcudnn.so.9"]


def test_copies_are_read_from_nsys():
    """Number and bytes by direction; other memory operations and other lines are left out."""
    assert traces.from_nsys(NSYS) == {
        "Host-to-Device": {"count": 640, "bytes": 1_965_536_000},
        "Device-to-Host": {"count": 20, "bytes": 4000},
    }
    assert traces.from_nsys("") == {}


def test_copies_are_read_from_the_profiler():
    """Copies of pinned and pageable memory add up."""
    assert traces.from_profiler(PROFILER) == {
        "Host-to-Device": {"count": 2, "bytes": 4097},
        "Device-to-Host": {"count": 1, "bytes": 64},
    }


def test_copies_are_read_from_cupti():
    """Kinds have the numbers of CUPTI's manual; an unknown kind keeps its number."""
    assert traces.from_cupti([(1, 4096), (2, 64), (2, 1), (7, 5)]) == {
        "Host-to-Device": {"count": 1, "bytes": 4096},
        "Device-to-Host": {"count": 2, "bytes": 65},
        "kind 7": {"count": 1, "bytes": 5},
    }


@pytest.fixture
def tracer(tmp_path, monkeypatch):
    """Put a program named `nsys` first in PATH, which prints a table: `tracer(table)`."""

    def install(table: str) -> None:
        (tmp_path / "table").write_text(table)
        program = tmp_path / "nsys"
        program.write_text(f'#!/bin/sh\n[ "$1" = stats ] && cat {tmp_path}/table\nexit 0\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return install


def test_trace_is_that_of_nsys(tracer, tmp_path):
    """With nsys in PATH, its table counts."""
    tracer(NSYS)

    name, copies = traces.trace(lambda: None, [sys.executable], tmp_path)

    assert (name, copies["Device-to-Host"]["count"]) == ("nsys", 20)


def test_an_empty_trace_is_not_a_proof(tracer, tmp_path):
    """A trace without the copies of the images to the device fails the section."""
    tracer("Total (MB),Count,Operation\n")

    with pytest.raises(RuntimeError, match="lacks even the copies of the images"):
        traces.trace(lambda: None, [sys.executable], tmp_path)


def test_metrics_are_added():
    """The series of a metric add up; a missing metric is 0."""
    assert server.sum_of(METRICS, server.FROM_HOST) == 7
    assert server.sum_of(METRICS, server.RUNS) == 0


def test_a_planted_fault_is_a_difference():
    """Rows compared with themselves have none; a shift by two levels and swapped colours are found."""
    wanted = kernel.EXACT
    row = np.random.default_rng(0).integers(0, 250, wanted.shape, np.uint8)

    assert chain.difference(wanted, row, row) == {"mean": 0.0, "max": 0.0}
    assert chain.difference(wanted, row + np.uint8(2), row) == {"mean": 2.0, "max": 2.0}
    assert chain.difference(wanted, row[..., ::-1], row)["mean"] > 1


def test_normalisation_is_undone():
    """Levels are those of the pixels, independent of layout and normalisation."""
    wanted = chain.transform()
    pixels = np.random.default_rng(0).integers(0, 256, (224, 224, 3)).astype(np.float32)
    row = ((pixels - np.float32(wanted.mean)) / np.float32(wanted.std)).transpose(2, 0, 1)

    np.testing.assert_allclose(chain.levels(wanted, row), pixels, atol=1e-4)


def outcomes(**changes: dict) -> dict:
    """Return the outcomes of all files as expected, but for some."""
    return {
        name: {
            "fallbacks": file.fallbacks,
            "error": "damaged" * file.is_damaged,
            "error_on_host": "damaged" * file.is_damaged,
            "mean": None if file.is_damaged else 0.25,
            **changes.get(name, {}),
        }
        for name, file in decoder.files().items()
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ([], [], 0.25)),
        ({"PNG": {"fallbacks": 0}}, (["PNG"], [], 0.25)),
        ({"empty": {"error": "other"}}, ([], ["empty"], 0.25)),
        ({"WebP": {"mean": 7.5}}, ([], [], 7.5)),
    ],
    ids=["as expected", "fallback", "error", "pixels"],
)
def test_decoders_faults_are_found(changes, expected):
    """A wrong decoder, another error and other pixels are found in one file of twelve."""
    found = decoder.verdicts(outcomes(**changes))

    names = ("unexpected_fallbacks", "unexpected_errors", "worst_mean")
    assert tuple(found[name] for name in names) == expected


def test_loads_of_several_clients_are_joined():
    """Rates and numbers add up; the worst percentile counts."""
    first, second = Load(100.0, 3.0, 5.0, 9.0, 200, 0), Load(50.0, 4.0, 4.5, 20.0, 100, 1)

    assert served.together([first, second]) == Load(150.0, 4.0, 5.0, 20.0, 300, 1)


def test_a_rate_with_failures_is_not_the_best():
    """Fast errors do not count."""
    assert served.best([{"per_s": 10, "failed": 0}, {"per_s": 99, "failed": 1}]) == 10
    assert served.best([]) == 0


def test_ratios_use_the_slower_step():
    """The limit is the best rate of the slower one of decoder and network."""
    rows = [
        {"decode_per_s": 800.0, "network_per_s": 900.0, "whole_per_s": 400.0},
        {"decode_per_s": 1000.0, "network_per_s": 4000.0, "whole_per_s": 600.0},
    ]

    assert speed.ratios(rows, [{"per_s": 850.0, "failed": 0}]) == {
        "slower_step_per_s": 1000.0,
        "served_to_slower_step": 0.85,
        "in_process_to_slower_step": 0.6,
    }


def test_summary_has_the_percentiles():
    """The p99 of few calls is the slowest call."""
    assert chain.summary([3.0, 1.0, 2.0]) == {"p50_ms": 2.0, "p99_ms": 3.0, "calls": 3}


def test_a_process_of_another_container_has_no_name():
    """Its pid may not exist here."""
    assert memory.command(2**22 + 1) == ""
    assert "python" in memory.command(os.getpid())


def test_the_gpu_is_free_after_the_block():
    """The process that fills the GPU ends when its input is closed; one that fails is an error."""
    program = "import sys; print(4096, flush=True); sys.stdin.read(); print('end')"
    with full_gpu.full_gpu((sys.executable, "-c", program)) as taken:
        assert taken == 4096

    with (
        pytest.raises(RuntimeError, match="fills the GPU failed"),
        full_gpu.full_gpu((sys.executable, "-c", "raise SystemExit(1)")),
    ):
        pass


def passing() -> dict:
    """Return sections in which every claim holds."""
    tests = {"passed": 5, "failed": 0, "skipped": 1}
    results = {
        "kernel": {
            PREPROCESSOR: tests,
            "against_cpu_path": {"worst_mean": 0.1},
            "against_pillow": {"worst_mean": 0.1},
        },
        "decoder": {
            "worst_mean": 0.4,
            "unexpected_fallbacks": [],
            "unexpected_errors": [],
            "alone": {"damaged": 4, "failed": 4, "good_row_unchanged": True},
            "fallbacks_of_photos": 0,
        },
        "zero_copy": {"addresses": {"are_equal": True}, "to_host": {"count": 0, "bytes": 0}},
        "server": {
            **{name: tests for section, name in claims.TESTS if section == "server"},
            "python_backend_has_cuda_code": True,
            "instances": {"a": ["KIND_GPU"], "b": ["KIND_GPU"]},
            "processes": {"a:1": 2, "b:1": 2, "b:2": 2},
            "inputs_through_host": 0.0,
            "counted_of_one_tensor_sent": 1.0,
            "classes": ["espresso"],
        },
        "speed": {
            "served": [{"in_flight": 1, "p50_ms": 2.5, "per_s": 300.0, "failed": 0}],
            "in_process": [{"p50_ms": 2.0}],
            "served_to_slower_step": 0.9,
            "served_to_by_hand": 3.5,
        },
        "pipeline": {
            "alone": {"1": {"p50_ms": 2.1}},
            "overlapped_per_s": {"1": 800.0, "32": 3400.0},
            "wrong_in_mixed_batches": 0,
            "bytes_to_host_but_scores": 0,
        },
        "precisions": {
            "recorded": {"max_difference": 0.0002},
            "changing": {"without_graphs_ms": 200.0, "with_graphs_ms": 2.0},
            "engines": {"loads": [{"seconds": 31.5}, {"seconds": 0.9}], "are_reused": True},
            "forms": {
                name: {"batch_8": {"max_difference": 0.0005, "same_class": True}}
                for name in ("FP32", "FP32, CUDA graph", "FP16", "INT8", "TensorRT FP32", "TensorRT FP16")
            },
        },
        "memory": {
            "after_requests_mib": 1500,
            "after_load_mib": 1510,
            "after_stop_mib": 0,
            "is_right_after_full": True,
            "halves": {"limits": {"320 MiB": "1 batch(es) in halves"}, "max_difference": 0.0003},
            "server_runs": True,
        },
        "processor": {"best_per_s": 80.0},
    }
    return {name: {"status": "done", "results": found} for name, found in results.items()}


def test_a_run_that_meets_all_targets_misses_none():
    """Every claim has a result."""
    rows = claims.rows(passing())

    assert claims.missed(rows) == []
    assert [row["claim"] for row in rows if row["result"] == claims.NOT_RUN] == []


@pytest.mark.parametrize(
    ("section", "changes", "claim"),
    [
        (
            "kernel",
            {PREPROCESSOR: {"passed": 5, "failed": 1, "skipped": 0}},
            "`tests/gpu/test_gpu_preprocessor.py`",
        ),
        (
            "kernel",
            {PREPROCESSOR: {"passed": 0, "failed": 0, "skipped": 9}},
            "`tests/gpu/test_gpu_preprocessor.py`",
        ),
        (
            "kernel",
            {PREPROCESSOR: {**gpu_tests.outcomes("<testsuites/>"), "stopped_after_s": 9}},
            "`tests/gpu/test_gpu_preprocessor.py`",
        ),
        ("kernel", {"against_cpu_path": {"worst_mean": 1.1}}, "kernel and CPU path"),
        ("kernel", {"against_pillow": {"worst_mean": 0.7}}, "kernel and Pillow"),
        ("decoder", {"worst_mean": 1.1}, "nvImageCodec with the kernel"),
        ("decoder", {"unexpected_fallbacks": ["PNG"]}, "kinds of files"),
        ("decoder", {"unexpected_errors": ["empty"]}, "files with another error"),
        (
            "decoder",
            {"alone": {"damaged": 4, "failed": 5, "good_row_unchanged": True}},
            "damaged files fail alone",
        ),
        ("decoder", {"fallbacks_of_photos": 1}, "photos that the host decodes"),
        ("zero_copy", {"addresses": {"are_equal": False}}, "the network reads the tensor"),
        ("zero_copy", {"to_host": {"count": 20, "bytes": 0}}, "copies from device to host"),
        ("zero_copy", {"to_host": {"count": 0, "bytes": zero_copy.ROW_BYTES}}, "bytes of these copies"),
        ("server", {"python_backend_has_cuda_code": False}, "the Python backend in the wheel"),
        ("server", {"instances": {"a": ["KIND_GPU"], "b": ["KIND_CPU"]}}, "the embedded server starts"),
        ("server", {"inputs_through_host": 20.0}, "the Python backend passes tensors on"),
        ("server", {"counted_of_one_tensor_sent": 0.0}, "the same counter"),
        ("server", {"classes": ["espresso", "cup"]}, "classes of the coffee photo"),
        ("speed", {"in_process": [{"p50_ms": 3.1}]}, "JPEG of 1080p to scores in one process"),
        ("speed", {"served_to_slower_step": 0.79}, "best rate of the server, as a share"),
        ("speed", {"served_to_by_hand": 2.9}, "best rate of the server, as a multiple"),
        ("pipeline", {"alone": {"1": {"p50_ms": 3.1}}}, "JPEG of 1080p to scores as the profile"),
        ("pipeline", {"wrong_in_mixed_batches": 1}, "images of mixed overlapping batches"),
        ("pipeline", {"bytes_to_host_but_scores": 4}, "bytes that overlapping batches copy"),
        ("server", {"processes": {"a:1": 2, "b:1": 1}}, "processes of each step"),
        ("precisions", {"recorded": {"max_difference": 0.4}}, "CUDA graphs of several batch sizes"),
        (
            "precisions",
            {"engines": {"loads": [{"seconds": 31.5}, {"seconds": 30.2}], "are_reused": False}},
            "a second load with TensorRT",
        ),
        ("memory", {"halves": {"limits": {}, "max_difference": 0.4}}, "a batch that exceeds"),
        ("memory", {"halves": {"limits": {"160 MiB": "error"}}}, "a batch that exceeds"),
        ("memory", {"after_load_mib": 1600}, "memory after unload and load"),
        ("memory", {"after_stop_mib": 5}, "memory that the stopped server keeps"),
        ("memory", {"is_right_after_full": False}, "right answers after"),
        ("memory", {"server_runs": False}, "right answers after"),
    ],
)
def test_each_target_can_be_missed(section, changes, claim):
    """A planted fault misses exactly the target of its claim."""
    sections = passing()
    sections[section]["results"] |= changes

    (missed,) = claims.missed(claims.rows(sections))

    assert missed.startswith(f"target missed: {claim}")


def test_a_claim_that_was_not_measured_is_not_run():
    """Without a record, and in a section that was cut off, there is no result."""
    assert {row["result"] for row in claims.rows({})} == {claims.NOT_RUN}

    sections = {**passing(), "memory": {"status": "timed out", "results": {}}}
    results = {row["result"] for row in claims.rows(sections) if row["section"] == "memory"}
    assert results == {f"{claims.NOT_RUN}: timed out"}


def test_a_missing_form_shows_its_reason():
    """A form of the network without TensorRT is not a missed target."""
    sections = passing()
    sections["precisions"]["results"]["forms"]["TensorRT FP16"] = {"missing": "tensorrt; fix: pip"}

    sections["precisions"]["results"]["engines"] = {"missing": "tensorrt; fix: pip"}

    rows = {row["claim"]: row["result"] for row in claims.rows(sections)}

    assert claims.missed(claims.rows(sections)) == []
    (shown,) = [result for claim, result in rows.items() if claim.startswith("TensorRT FP16")]
    assert shown.startswith("not run: tensorrt; fix: pip")


def test_page_shows_the_machine_of_the_record():
    """The line above the table has the GPU, the commit and the command."""
    found = [asdict(nvidia_smi.parse_gpus(gpu_outputs.GPU)[0])]
    recorded = {
        "sections": {**passing(), "machine": {"status": "done", "results": {"gpus": found}}},
        "machine": {"cpu": "AMD EPYC"},
        "date": "2026-11-26T05:00:00+00:00",
        "commit": "abc",
        "command": "python -m loadtest.gpu_check",
    }

    text = page.render(f"before\n{page.BEGIN}old{page.END}\nafter\n", recorded)

    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "NVIDIA A100-SXM4-80GB, driver 535.216.01; AMD EPYC; 2026-11-26; `python -m" in text
    assert "Sections by commit: abc: " in text
    assert "old" not in text


def test_page_without_markers_stays_as_it_is():
    """A page whose markers are damaged is not overwritten."""
    with pytest.raises(ValueError, match=r"expected .* in gpu\.md"):
        page.render(f"before\n{page.BEGIN}the rest of the page", None)

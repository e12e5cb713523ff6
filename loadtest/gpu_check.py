"""The checks that need an NVIDIA GPU: tests, zero-copy, times.

python -m loadtest.gpu_check [--rounds 50] [--record gpu_check]
"""

import argparse
import csv
import importlib.metadata
import importlib.util
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from loadtest import record
from nereid.assets import REPOSITORY
from nereid.config.model_config import ModelConfig
from nereid.imaging.decode import Limits
from nereid.imaging.preprocess_settings import PreprocessSettings
from nereid.tune import photos

ROOT = Path(__file__).resolve().parent.parent
BATCH_SIZES = (1, 8, 32)
WARM_UP_CALLS = 5
TRACED_BATCHES = 20
ROW_BYTES = 3 * 224 * 224 * 4
PACKAGES = re.compile(r"cupy-cuda\d+x|nvidia-(nvimgcodec|nvjpeg|cuda-nvrtc)\b.*")
NEEDED = {
    "cupy": "CuPy",
    "nvidia.nvimgcodec": "nvImageCodec",
    "onnxruntime": "ONNX Runtime",
    "pytest": "pytest",
}
FIX = "fix: pip install -e '.[embedded,gpu,dev]', with gpu13 instead of gpu for CUDA 13"
NO_TRACE = "no CUDA trace, because nsys is not installed: only the addresses show that nothing is copied back"


def missing() -> list[str]:
    """Return the missing parts of this machine, with fixes."""
    absent = [f"{word}; {FIX}" for name, word in NEEDED.items() if not _is_installed(name)]
    if not Path("/proc/driver/nvidia/version").exists():
        absent.insert(0, "an NVIDIA GPU with its driver (/proc/driver/nvidia/version)")
    if absent:
        return absent
    import cupy

    try:
        return [] if cupy.cuda.runtime.getDeviceCount() else ["an NVIDIA GPU: CUDA finds none"]
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return [f"an NVIDIA GPU that CUDA can use: {error}"]


def run_tests() -> dict[str, int]:
    """Run the GPU tests; returns the numbers of passed, failed and skipped tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "pytest", "-m", "gpu", "-rs", "--quiet", f"--junitxml={report}", "tests/gpu"]
        subprocess.run([sys.executable, *words], cwd=ROOT)
        return count_tests(report.read_text()) if report.exists() else count_tests("<testsuites/>")


def count_tests(report: str) -> dict[str, int]:
    """Count the outcomes in pytest's JUnit report."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    return {"passed": total - failed - errors - skipped, "failed": failed + errors, "skipped": skipped}


def trace() -> dict[str, int] | None:
    """Trace batches of JPEGs from bytes to DLPack; returns bytes copied by direction, or None without nsys.

    The trace does not contain memory that a kernel itself writes to the host.
    """
    if shutil.which("nsys") is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "trace")
        words = ["--trace=cuda", "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "-o", target]
        traced = [sys.executable, "-m", "loadtest.gpu_check", "--traced"]
        subprocess.run(["nsys", "profile", *words, *traced], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        report = ["--report", "cuda_gpu_mem_size_sum", "--format", "csv", f"{target}.nsys-rep"]
        stats = subprocess.run(
            ["nsys", "stats", "--quiet", *report], check=True, capture_output=True, text=True
        )
    return copied_bytes(stats.stdout)


def copied_bytes(table: str) -> dict[str, int]:
    """Parse nsys's table of memory operations: bytes by operation."""
    lines = table.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Total (MB)")), len(lines))
    rows = csv.DictReader(line for line in lines[start:] if line)
    return {row["Operation"]: round(float(row["Total (MB)"]) * 1e6) for row in rows}


def run_traced() -> None:
    """Run the work of `trace`: only batches of JPEGs, after all allocations and compilations."""
    import cupy
    import cupyx.profiler

    preprocessor = _build(max(BATCH_SIZES))
    images = [photos.jpeg(photos.SIZES_WH["640x427"])] * max(BATCH_SIZES)
    preprocessor.prepare(images)
    with cupyx.profiler.profile():
        for _ in range(TRACED_BATCHES):
            preprocessor.prepare(images)
            cupy.from_dlpack(preprocessor.tensor)


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    """Time each step by photo and batch size: medians over `rounds`, in milliseconds per batch."""
    for name, size_wh in photos.SIZES_WH.items():
        for batch_size in BATCH_SIZES:
            preprocessor = _build(batch_size)
            images = [photos.jpeg(size_wh)] * batch_size
            spent = [_times(preprocessor, images) for _ in range(WARM_UP_CALLS + rounds)][WARM_UP_CALLS:]
            medians = {step: statistics.median(each[step] for each in spent) for step in spent[0]}
            yield {
                "photo": name,
                "batch_size": batch_size,
                **{f"{step}_ms": round(value, 4) for step, value in medians.items()},
                "images_per_s": round(batch_size / medians["prepare"] * 1e3),
                "fallbacks": preprocessor.fallbacks,
            }


def _times(preprocessor: Any, images: list[bytes]) -> dict[str, float]:
    """Time one batch: each step between CUDA events on the preprocessor's stream, the whole by the clock."""
    import cupy

    def timed(call: Callable[[], Any]) -> tuple[float, Any]:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(preprocessor.stream)
        result = call()
        end.record(preprocessor.stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)), result

    with preprocessor.on_device():
        decode_ms, decoded = timed(lambda: preprocessor.decode(images))
        sources = [each.source for each in decoded]
        kernel_ms, _ = timed(lambda: preprocessor.resize(sources))
    hand_over_ms, _ = timed(lambda: cupy.from_dlpack(preprocessor.tensor))
    begin_s = time.perf_counter()
    preprocessor.prepare(images)
    prepare_ms = (time.perf_counter() - begin_s) * 1e3
    return {"decode": decode_ms, "kernel": kernel_ms, "hand_over": hand_over_ms, "prepare": prepare_ms}


def device() -> dict[str, Any]:
    """Return the GPU, its driver, CUDA, and the packages that use them."""
    import cupy

    runtime = cupy.cuda.runtime
    driver = re.search(r"\b\d+\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    return {
        "name": runtime.getDeviceProperties(0)["name"].decode(),
        "driver": driver[0] if driver else "unknown",
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "packages": {d.name: d.version for d in importlib.metadata.distributions() if PACKAGES.match(d.name)},
    }


def _build(batch_size: int) -> Any:
    from nereid.imaging.gpu_preprocessor import GpuPreprocessor

    settings = PreprocessSettings.from_config(ModelConfig.from_file(REPOSITORY / "imagenet_preprocess", 1))
    return GpuPreprocessor(settings.transform, Limits(), batch_size, device_id=0)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing, too
        return False


def problems(tests: dict[str, int], copies: dict[str, int] | None) -> list[str]:
    """Return the reasons why the check fails."""
    found = []
    if tests["failed"] or not tests["passed"]:
        found.append(f"GPU tests: expected passed tests and no failure, got {tests}")
    if copies == {}:
        found.append("the CUDA trace is empty: it lacks even the copies of the images to the device")
    to_host = sum(size for name, size in (copies or {}).items() if "Device-to-Host" in name)
    # The decoder may copy a few bytes of status; a tensor or an image is far larger.
    if to_host >= ROW_BYTES:
        found.append(f"copies from device to host: expected less than {ROW_BYTES} bytes, got {to_host}")
    return found


def main() -> int:
    """Test, trace, time, print and record."""
    parser = record.parser(__doc__, rounds=50)
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)
    args = record.parsed(parser)
    if absent := missing():
        sys.exit("\n".join(f"missing: {each}" for each in absent))
    if args.traced:
        run_traced()
        return 0
    tests, copies = run_tests(), trace()
    rows = list(measure(args.rounds))
    about = device()
    print(f"{about['name']}, driver {about['driver']}")
    record.show([*rows[0]], ([*row.values()] for row in rows))
    print(NO_TRACE if copies is None else f"bytes copied in {TRACED_BATCHES} batches: {copies}")
    if found := problems(tests, copies):
        sys.exit("\n".join(found))
    return record.finish(args.record, {"gpu": about, "tests": tests, "bytes_copied": copies, "times": rows})


if __name__ == "__main__":
    record.end(main)

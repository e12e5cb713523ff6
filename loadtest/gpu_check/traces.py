"""Copies between host and device, from three tracers of CUDA: nsys, CUPTI, and PyTorch's profiler."""

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from loadtest.gpu_check.sections import CUPTI, NSYS, TORCH

# CUpti_ActivityMemcpyKind. Source: the CUPTI manual.
COPY_KINDS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
DIRECTIONS = {
    "HtoD": "Host-to-Device",
    "DtoH": "Device-to-Host",
    "DtoD": "Device-to-Device",
    "HtoH": "Host-to-Host",
    "PtoP": "Peer-to-Peer",
}
TO_HOST, TO_DEVICE = DIRECTIONS["DtoH"], DIRECTIONS["HtoD"]
BUFFER_BYTES = 8 * 2**20
NO_TRACER = f"no tracer of CUDA: {NSYS}; or {CUPTI}; or {TORCH}"

# Number and bytes of the copies by direction.
Copies = dict[str, dict[str, int]]


def from_nsys(table: str) -> Copies:
    """Parse `nsys stats --report cuda_gpu_mem_size_sum --format csv`; bytes are rounded to 1000."""
    lines = table.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Total (MB)")), len(lines))
    found: Copies = {}
    for row in csv.DictReader(line for line in lines[start:] if line):
        if name := re.search(r"memcpy ([\w-]+)", row["Operation"]):
            size, count = (row[column].replace(",", "") for column in ("Total (MB)", "Count"))
            _add(found, name[1], round(float(size) * 1e6), int(count))
    return found


def from_profiler(trace: str) -> Copies:
    """Parse the trace that PyTorch's profiler exports for Chrome."""
    found: Copies = {}
    for event in json.loads(trace)["traceEvents"]:
        if event.get("cat") == "gpu_memcpy":
            name = event["name"].split()[1]
            _add(found, DIRECTIONS.get(name, name), int(event.get("args", {}).get("bytes", 0)))
    return found


def from_cupti(activities: Iterable[tuple[int, int]]) -> Copies:
    """Sum CUPTI's records of copies: kind and bytes of each."""
    found: Copies = {}
    for kind, size in activities:
        name = COPY_KINDS.get(kind, f"kind {kind}")
        _add(found, DIRECTIONS.get(name, name), size)
    return found


def trace(work: Callable[[], Any], nsys_words: list[str], folder: Path) -> tuple[str, Copies]:
    """Trace `work` with the first tracer that is installed; returns its name and the copies.

    The trace does not contain memory of the host that a kernel itself writes.

    Args:
        nsys_words: command that runs `work` between cudaProfilerStart and cudaProfilerStop; empty: without
            `nsys`.
        folder: takes the tracer's files.

    Raises:
        RuntimeError: no tracer is installed, or the trace is empty.
    """
    if nsys_words and shutil.which(NSYS.name):
        name, copies = NSYS.name, _with_nsys(nsys_words, folder / "trace")
    elif CUPTI.is_installed:
        name, copies = CUPTI.name, _with_cupti(work)
    elif TORCH.is_installed:
        name, copies = TORCH.name, _with_profiler(work, folder / "trace.json")
    else:
        raise RuntimeError(NO_TRACER)
    if TO_DEVICE not in copies:
        raise RuntimeError(f"the trace of {name} lacks even the copies of the images to the device: {copies}")
    return name, copies


def _with_nsys(words: list[str], target: Path) -> Copies:
    options = ["--trace=cuda", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    command = ["nsys", "profile", *options, "--force-overwrite=true", "-o", str(target), *words]
    subprocess.run(command, check=True, stdout=sys.stderr)
    report = ["--report", "cuda_gpu_mem_size_sum", "--format", "csv", f"{target}.nsys-rep"]
    done = subprocess.run(["nsys", "stats", "--quiet", *report], check=True, capture_output=True, text=True)
    return from_nsys(done.stdout)


def _with_cupti(work: Callable[[], Any]) -> Copies:
    from cupti import cupti

    seen: list[tuple[int, int]] = []
    memcpy = cupti.ActivityKind.MEMCPY

    def completed(activities: list[Any]) -> None:
        seen.extend((int(each.copy_kind), int(each.bytes)) for each in activities if each.kind == memcpy)

    cupti.activity_register_callbacks(lambda: (BUFFER_BYTES, 0), completed)
    cupti.activity_enable(memcpy)
    try:
        work()
        cupti.activity_flush_all(1)
    finally:
        cupti.activity_disable(memcpy)
    return from_cupti(seen)


def _with_profiler(work: Callable[[], Any], target: Path) -> Copies:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    profiler.export_chrome_trace(str(target))
    return from_profiler(target.read_text())


def _add(found: Copies, direction: str, size: int, count: int = 1) -> None:
    entry = found.setdefault(direction, {"count": 0, "bytes": 0})
    entry["count"] += count
    entry["bytes"] += size

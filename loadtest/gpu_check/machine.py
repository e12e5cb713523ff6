"""Section 1: the GPU, its driver, CUDA, the packages, and the parts that are missing."""

import csv
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from loadtest import record
from loadtest.gpu_check.sections import CUPY, SECTIONS, SMI, Context, Findings, missing
from nereid.processes import available_bytes

# Columns of `nvidia-smi --query-gpu`, and the names in the record; memory is in MiB.
COLUMNS = {
    "name": "name",
    "uuid": "uuid",
    "driver_version": "driver",
    "compute_cap": "compute_capability",
    "memory.total": "memory_total_mib",
    "memory.used": "memory_used_mib",
    "power.limit": "power_limit_w",
    "clocks.max.sm": "clock_max_mhz",
    "mig.mode.current": "mig",
}
NUMBERS = ("memory_total_mib", "memory_used_mib", "power_limit_w", "clock_max_mhz")
# Texts of nvidia-smi for a value that this GPU does not report.
UNKNOWN = ("[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "")
LIBRARIES_FIX = "pip install 'onnxruntime-gpu[cuda,cudnn]'; TensorRT: pip install tensorrt-cu12"
PACKAGES = re.compile(
    r"(cupy-cuda\d+x|nvidia-.*|cuda-.*|cupti-python|onnxruntime.*|onnx|tensorrt.*|torch|numpy|pillow)$",
    re.IGNORECASE,
)


def measure(context: Context) -> Iterator[Findings]:
    """Yield the facts about the machine."""
    yield {"machine": record.machine(), "memory_available_bytes": available_bytes(), "packages": packages()}
    yield {"missing": missing(all_parts())}
    if shutil.which(SMI.name):
        yield {"gpus": gpus(), "cuda_of_driver": cuda_version(smi())}
    if CUPY.is_installed:
        yield {"cuda": cuda()}
    yield {"missing_libraries": missing_libraries()}


def rehearse(context: Context) -> Iterator[Findings]:
    """Yield the facts that need no GPU."""
    yield {"machine": record.machine(), "memory_available_bytes": available_bytes(), "packages": packages()}
    yield {"missing": missing(all_parts()), "missing_libraries": missing_libraries()}


def all_parts() -> Sequence[Any]:
    """Return the parts of all sections, each once."""
    return [*dict.fromkeys(part for section in SECTIONS for part in (*section.needed, *section.useful))]


def missing_libraries() -> dict[str, str]:
    """Return the libraries that each of ONNX Runtime's providers lacks here, with the fix."""
    found = importlib.util.find_spec("onnxruntime")
    places = (found and found.submodule_search_locations) or ()
    providers = [path for place in places for path in sorted(Path(place).glob("capi/*_providers_*.so"))]
    lacking = {path.name: unresolved(_ldd(path)) for path in providers}
    return {name: f"{', '.join(each)}; fix: {LIBRARIES_FIX}" for name, each in lacking.items() if each}


def unresolved(text: str) -> list[str]:
    """Parse `ldd`: the libraries that are not found."""
    return re.findall(r"^\s*(\S+) => not found", text, re.MULTILINE)


def packages() -> dict[str, str]:
    """Return the versions of the packages that use the GPU, or are compared with it."""
    names = {each.name: each.version for each in importlib.metadata.distributions()}
    return {name: version for name, version in sorted(names.items()) if PACKAGES.match(name)}


def gpus() -> list[dict[str, Any]]:
    """Return the properties of each GPU."""
    return parse_gpus(smi(f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits"))


def parse_gpus(table: str) -> list[dict[str, Any]]:
    """Parse the CSV of `nvidia-smi --query-gpu` for `COLUMNS`; a value that is not reported is None."""
    rows = csv.reader(table.strip().splitlines(), skipinitialspace=True)
    return [dict(zip(COLUMNS.values(), map(_value, COLUMNS.values(), row), strict=True)) for row in rows]


def memory_used_mib() -> int:
    """Return the used memory of the first GPU, of all processes."""
    return int(smi("--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"))


def process_memory_mib() -> dict[int, int]:
    """Return the memory of each process on the first GPU; empty in a container that hides processes."""
    return parse_processes(
        smi("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits", "--id=0")
    )


def parse_processes(table: str) -> dict[int, int]:
    """Parse the CSV of `nvidia-smi --query-compute-apps=pid,used_memory`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.strip().splitlines()]
    return {int(row[0]): int(row[1]) for row in rows if len(row) == 2 and all(map(str.isdigit, row))}


def cuda_version(text: str) -> str:
    """Return the newest CUDA release that the driver supports, from the head of `nvidia-smi`'s output."""
    found = re.search(r"CUDA(?: UMD)? Version\s*:\s*([\d.]+)", text)
    return found[1] if found else ""


def cuda() -> dict[str, Any]:
    """Return the first GPU as CUDA reports it."""
    import cupy

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    free_bytes, total_bytes = runtime.memGetInfo()
    return {
        "name": properties["name"].decode(),
        "devices": runtime.getDeviceCount(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "multiprocessors": properties["multiProcessorCount"],
        "driver": runtime.driverGetVersion(),
        "runtime": runtime.runtimeGetVersion(),
        "memory_total_bytes": total_bytes,
        "memory_free_bytes": free_bytes,
    }


def smi(*words: str) -> str:
    """Return the output of `nvidia-smi`."""
    return subprocess.run(
        [SMI.name, *words], capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()


def _ldd(path: Path) -> str:
    return subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout


def _value(name: str, text: str) -> Any:
    text = text.strip()
    if text in UNKNOWN:
        return None
    return float(text) if name in NUMBERS else text

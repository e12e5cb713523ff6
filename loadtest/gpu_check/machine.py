"""The GPU, its driver, CUDA, the packages, and the parts that are missing."""

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest import record
from loadtest.gpu_check.sections import CUPY, SECTIONS, SMI, Context, Findings, missing
from nereid.processes import available_bytes
from nereid.server.gpu import nvidia_smi

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
        gpus = [asdict(gpu) for gpu in nvidia_smi.read_gpus()]
        yield {"gpus": gpus, "cuda_of_driver": nvidia_smi.read_cuda_version()}
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


def memory_used_mib() -> int:
    """Return the used memory of the first GPU, of all processes."""
    return int(nvidia_smi.read_gpus()[0].memory_used_mib or 0)


def process_memory_mib() -> dict[int, int]:
    """Return the memory of each process on the first GPU; empty in a container that hides processes."""
    first = nvidia_smi.read_gpus()[0].uuid
    found = [each for each in nvidia_smi.read_processes() if each.uuid == first]
    return {each.pid: each.memory_mib for each in found if each.memory_mib is not None}


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


def _ldd(path: Path) -> str:
    return subprocess.run(["ldd", str(path)], capture_output=True, text=True).stdout

"""The GPU, its driver, CUDA, the packages, and the parts that are missing."""

import importlib.util
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest import record
from loadtest.gpu_check.processes import Context
from nereid.base.processes import available_bytes
from nereid.insight.observe import gpu_findings
from nereid.server import nvidia_smi
from nereid.server.installation import find_installation

EXTRAS = "pip install -e '.[embedded,gpu,gateway,load,publish,dev]', with gpu13 instead of gpu for CUDA 13"
SMI = "nvidia-smi"
# Modules, and how to install them.
PARTS = {
    **dict.fromkeys(("cupy", "nvidia.nvimgcodec", "onnxruntime", "pytriton", "uvicorn", "uvloop"), EXTRAS),
    **dict.fromkeys(("onnx", "pytest", "xdist"), EXTRAS),
    "cupti": "pip install cupti-python, of the driver's CUDA release",
    "torch": "optional: pip install torch torchvision timm, built for the driver's CUDA release",
    "tensorrt": "optional: pip install tensorrt-cu12, in the release that ONNX Runtime names",
}
DRIVER_FIX = "install NVIDIA's driver, or give the container the capability utility"
# A Python backend that can share memory of CUDA between processes contains these names.
CUDA_NAMES = (b"cudaIpcMemHandle", b"FORCE_CPU_ONLY_INPUT_TENSORS", b"libcuda.so")


def measure(context: Context) -> Iterator[dict[str, Any]]:
    """Yield the facts about the machine."""
    yield {
        "machine": record.machine(),
        "memory_available_bytes": available_bytes(),
        "packages": record.packages(),
    }
    yield {"missing": missing()}
    if shutil.which(SMI):
        gpus = [asdict(gpu) for gpu in nvidia_smi.read_gpus()]
        yield {"gpus": gpus, "cuda_of_driver": nvidia_smi.read_cuda_version()}
    if has("pytriton"):
        yield {"python_backend_has_cuda_code": python_backend_has_cuda_code(context.environment)}
    # Programs that use the GPU, each with a time limit.
    findings = gpu_findings.diagnose_gpus(context.environment, ())
    yield {"doctor": [f"{finding.check}: {finding.status}: {finding.detail}" for finding in findings]}


def has(module: str) -> bool:
    """Check whether a module is installed; it is not imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing, too
        return False


def missing() -> list[str]:
    """Return the parts that are not installed, with their fixes."""
    absent = [f"{name}; fix: {fix}" for name, fix in PARTS.items() if not has(name)]
    return [*absent, *[f"{SMI}; fix: {DRIVER_FIX}"] * (shutil.which(SMI) is None)]


def python_backend_has_cuda_code(environment: Mapping[str, str]) -> bool:
    """Check whether the installed Python backend is built with CUDA, as its file shows it."""
    library = next(Path(find_installation(environment).backends).rglob("libtriton_python.so"))
    content = library.read_bytes()
    return all(name in content for name in CUDA_NAMES)

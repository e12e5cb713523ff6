"""Kinds of failed runs, from ONNX Runtime's texts: a lack of memory, a broken device, or anything else."""

import re

from nereid.base.errors import (
    LOST_DEVICE,
    DeviceFailed,
    OutOfMemory,
    RuntimeFailed,
    ServingError,
    lost_device,
    official_text,
)

# Source: onnxruntime 1.31, core/framework/bfc_arena.cc (the first two; the second if `gpu_mem_limit` is
# reached), libstdc++, and the names of errors in CUDA 12, cuBLAS and cuDNN 9.
_NO_MEMORY = re.compile(
    r"Failed to allocate memory for requested buffer"
    r"|Available memory of \d+ is smaller than requested bytes of"
    r"|bad_alloc|bad allocation"
    r"|out of memory"
    r"|(CUBLAS|CUDNN|CUSPARSE|CUFFT)_\w*ALLOC(ATION)?_FAILED",
    re.IGNORECASE,
)
_CUDA_FAILURE = re.compile(r"CUDA failure (?P<code>\d+):")
_BROKEN_DEVICE = re.compile(
    r"(CUBLAS|CUDNN) failure \d+: \w*_(NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
    r"|CUDNN_FE failure \d+: CUDNN_BACKEND_API_FAILED"
    r"|TensorRT EP execution context enqueue failed"
    r"|no CUDA-capable device is detected"
    r"|GPU (has fallen off the bus|is lost)",
    re.IGNORECASE,
)
# INVALID_ARGUMENT: such a text may contain parts of the request.
_OF_THE_REQUEST = "onnx runtime error 2: "


def run_failure(error: Exception) -> ServingError:
    """Return the error for a run that raised `error`: `OutOfMemory`, `DeviceFailed` or `RuntimeFailed`."""
    if lost := lost_device(error):
        return lost
    text = official_text(error)
    if text.startswith(_OF_THE_REQUEST):
        return RuntimeFailed(text)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
        return OutOfMemory(text)
    return DeviceFailed(text) if _is_broken_device(text) else RuntimeFailed(text)


def _is_broken_device(text: str) -> bool:
    codes = {int(found["code"]) for found in _CUDA_FAILURE.finditer(text)}
    return bool(codes & LOST_DEVICE) or _BROKEN_DEVICE.search(text) is not None

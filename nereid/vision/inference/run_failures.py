"""Errors of ONNX Runtime and CUDA: what the text of a failed run means."""

import re

from nereid.base.errors import (
    DEVICE_FAILURE_CODES,
    DeviceFailed,
    OutOfMemory,
    RuntimeFailed,
    ServingError,
    find_device_failure,
)

# Source: onnxruntime 1.31, core/framework/bfc_arena.cc (the first two; the second when `gpu_mem_limit` is
# reached), libstdc++, and the error names of CUDA 12, cuBLAS and cuDNN 9.
_NO_MEMORY = re.compile(
    r"Failed to allocate memory for requested buffer"
    r"|Available memory of \d+ is smaller than requested bytes of"
    r"|bad_alloc|bad allocation"
    r"|out of memory"
    r"|(CUBLAS|CUDNN|CUSPARSE|CUFFT)_\w*ALLOC(ATION)?_FAILED",
    re.IGNORECASE,
)
_CUDA_FAILURE = re.compile(r"CUDA failure (?P<code>\d+):")
_DEVICE_FAILURE = re.compile(
    r"(CUBLAS|CUDNN) failure \d+: \w*_(NOT_INITIALIZED|EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
    r"|CUDNN_FE failure \d+: CUDNN_BACKEND_API_FAILED"
    r"|TensorRT EP execution context enqueue failed"
    r"|no CUDA-capable device is detected"
    r"|GPU (has fallen off the bus|is lost)",
    re.IGNORECASE,
)
# INVALID_ARGUMENT: this message may quote parts of the request.
_OF_THE_REQUEST = "onnx runtime error 2: "


def onnxruntime_error_text(error: Exception) -> str:
    """Format an ONNX Runtime exception on one line as NVIDIA does: `onnx runtime error CODE: MESSAGE`."""
    text = str(error)
    match = re.match(r"\[ONNXRuntimeError\] : (?P<code>\d+) : \w+ : (?P<message>.*)", text, re.DOTALL)
    code, message = (match["code"], match["message"]) if match else ("1", text)
    return f"onnx runtime error {code}: {' '.join(message.split())}"


def run_failure(error: Exception) -> ServingError:
    """Return the error for a run that raised `error`: `OutOfMemory`, `DeviceFailed` or `RuntimeFailed`."""
    if lost := find_device_failure(error):
        return lost
    text = onnxruntime_error_text(error)
    if text.startswith(_OF_THE_REQUEST):
        return RuntimeFailed(text)
    if isinstance(error, MemoryError) or _NO_MEMORY.search(text):
        return OutOfMemory(text)
    return DeviceFailed(text) if _is_device_failure(text) else RuntimeFailed(text)


def _is_device_failure(text: str) -> bool:
    codes = {int(match["code"]) for match in _CUDA_FAILURE.finditer(text)}
    return bool(codes & DEVICE_FAILURE_CODES) or _DEVICE_FAILURE.search(text) is not None

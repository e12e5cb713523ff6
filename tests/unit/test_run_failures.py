"""Kinds of failed runs, from texts that ONNX Runtime has reported; the issues are those of its repository."""

import pytest

from nereid.base.serving_errors import DeviceFailed, OutOfMemory, RuntimeFailed
from nereid.vision.inference.run_failures import run_failure
from tests.faulty_networks import CUDADriverError, CUDARuntimeError
from tests.tables import cases

FAIL, EXCEPTION, INVALID = (
    f"[ONNXRuntimeError] : {kind} : "
    for kind in ("1 : FAIL", "6 : RUNTIME_EXCEPTION", "2 : INVALID_ARGUMENT")
)
ARENA = (
    "bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, onnxruntime::Stream*)"
)
RUNNING = "Non-zero status code returned while running"
CALL = "onnxruntime::CudaCall(ERRTYPE, const char*, int) [with ERRTYPE = cudaError; bool THRW = true] "
NODE = f"{RUNNING} Conv node. Name:'/fc1/Conv' Status Message: "


@pytest.mark.parametrize("kind", [CUDARuntimeError, CUDADriverError])
def test_broken_device_of_cupy_is_recognised(kind):
    lost = run_failure(kind(700, "an illegal memory access"))

    assert str(lost) == f"unavailable: device failed: {kind.__name__}: an illegal memory access"
    assert type(run_failure(kind(1, "invalid argument"))) is RuntimeFailed


def test_failed_allocation_in_python_is_a_lack_of_memory():
    """NumPy, and ONNX Runtime's binding, raise Python's own error."""
    assert type(run_failure(MemoryError("std::bad_alloc"))) is OutOfMemory
    assert type(run_failure(MemoryError())) is OutOfMemory


@cases(
    "text",
    {
        "arena, issue 22702": f"{EXCEPTION}{NODE}\n{ARENA} Failed to allocate memory for requested buffer",
        "without an arena, ONNX Runtime 1.31": f"{EXCEPTION}{NODE}std::bad_alloc",
        "gpu_mem_limit": f"{FAIL}{NODE}{ARENA} Available memory of 3 is smaller than requested bytes of 9",
        "CUDA, Deep-Live-Cam issue 584": f"{FAIL}{CALL}CUDA failure 2: out of memory ; GPU=0 ; hostname=h",
        "cuBLAS, issue 16512": f"{EXCEPTION}{NODE}{CALL}CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0",
        "cuDNN 9": f"{FAIL}{NODE}CUDNN failure 4: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ;",
    },
)
def test_lack_of_memory_is_recognised(text):
    """A text about memory is a lack of memory, though it may name a failure of CUDA."""
    failure = run_failure(RuntimeError(text))

    assert type(failure) is OutOfMemory
    assert str(failure).startswith("onnx runtime error ")


@cases(
    "text",
    {
        "failed kernel, roop-unleashed issue 32": f"{FAIL}CUDA failure 719: unspecified launch failure ;",
        "illegal address, pykeio/ort issue 321": f"{CALL}CUDA failure 700: an illegal memory access ; GPU=0",
        "unknown error, issue 14211": f"{CALL}CUDA failure 999: unknown error ; GPU=192915439",
        "no device, issue 11561": f"{CALL}CUDA failure 100: no CUDA-capable device is detected ; GPU=32712",
        "cuDNN, issue 23497": f"{FAIL}{NODE}CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED ; GPU=0",
        "ComfyUI issue 5562": f"{FAIL}{NODE}CUDNN failure 1001: CUDNN_STATUS_NOT_INITIALIZED ; GPU=0",
        "cuDNN frontend, issue 23301": f"{FAIL}{NODE}CUDNN_FE failure 11: CUDNN_BACKEND_API_FAILED ; GPU=0",
        "TensorRT, VSGAN issue 74": f"{FAIL}{NODE}TensorRT EP execution context enqueue failed.",
    },
)
def test_broken_device_is_recognised(text):
    failure = run_failure(RuntimeError(text))

    assert type(failure) is DeviceFailed
    assert str(failure).startswith("unavailable: device failed: onnx runtime error 1: ")


@cases(
    "text",
    {
        "text from the request": f"{INVALID}Got invalid dimensions for input: CUDA failure 700: x for",
        "invalid argument": f"{FAIL}{CALL}CUDA failure 1: invalid argument ; GPU=0",
        "built for other devices": f"{FAIL}CUDA failure 209: no kernel image is available on the device",
        "not supported": f"{FAIL}{NODE}CUDNN failure 3000: CUDNN_STATUS_NOT_SUPPORTED ; GPU=0",
        "bad parameter, issue 1606": f"{FAIL}CUDNN failure 3: CUDNN_STATUS_BAD_PARAM ; GPU=0",
        "reshape": f"{EXCEPTION}{RUNNING} Reshape node. Name:'r' Status Message: cannot be reshaped",
    },
)
def test_other_failures_stay_those_of_the_run(text):
    assert type(run_failure(RuntimeError(text))) is RuntimeFailed

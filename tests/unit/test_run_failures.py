"""Kinds of failed runs, from texts that ONNX Runtime has reported; the issues are those of its repository."""

import pytest

from nereid.inference.run_failures import run_failure
from nereid.serving_errors import DeviceFailed, OutOfMemory, RuntimeFailed
from tests.faulty_networks import CUDADriverError, CUDARuntimeError

FAIL, EXCEPTION, INVALID = (
    f"[ONNXRuntimeError] : {kind} : "
    for kind in ("1 : FAIL", "6 : RUNTIME_EXCEPTION", "2 : INVALID_ARGUMENT")
)
ARENA = "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:"
RUNNING = "Non-zero status code returned while running"
CALL = (
    "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:121 std::conditional_t<THRW, void, "
    "onnxruntime::common::Status> onnxruntime::CudaCall(ERRTYPE, const char*, const char*, ERRTYPE, "
    "const char*, const char*, int) [with ERRTYPE = cudaError; bool THRW = true] "
)


@pytest.mark.parametrize("kind", [CUDARuntimeError, CUDADriverError])
def test_broken_device_of_cupy_is_recognised(kind):
    lost = run_failure(kind(700, "an illegal memory access"))
    other = run_failure(kind(1, "invalid argument"))

    assert str(lost) == f"unavailable: device failed: {kind.__name__}: an illegal memory access"
    assert type(other) is RuntimeFailed


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            f"{EXCEPTION}{RUNNING} Conv node. Name:'/fc1/Conv' Status Message: \n{ARENA}376 "
            "void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, "
            "onnxruntime::Stream*, bool, onnxruntime::WaitNotificationFn) Failed to allocate memory for "
            "requested buffer of size 4585490524328388608",
            id="arena, issue 22702",
        ),
        pytest.param(
            f"{FAIL}{RUNNING} MatMul node. Name:'' Status Message: {ARENA}360 void*"
            " onnxruntime::BFCArena::AllocateRawInternal(size_t, bool, "
            "onnxruntime::Stream*) Failed to allocate memory for requested buffer of size 134217728",
            id="arena on a CPU, ONNX Runtime 1.31",
        ),
        pytest.param(
            f"{EXCEPTION}{RUNNING} MatMul node. Name:'' Status Message: std::bad_alloc",
            id="without an arena, ONNX Runtime 1.31",
        ),
        pytest.param(
            f"{FAIL}{RUNNING} Cast node. Name:'cast' Status Message: BFCArena::AllocateRawInternal Available "
            "memory of 34699008 is smaller than requested bytes of 945041920",
            id="gpu_mem_limit, bfc_arena.cc",
        ),
        pytest.param(
            f"{FAIL}{CALL}CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; file=cuda_stream_handle.cc ; "
            "line=175 ; expr=cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);",
            id="CUDA, Deep-Live-Cam issue 584",
        ),
        pytest.param(
            f"{EXCEPTION}{RUNNING} Gemm node. Name:'fc1' Status Message: {CALL}CUBLAS failure 3: "
            "CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; hostname=h ; file=cuda_execution_provider.cc ; line=168 ; "
            "expr=cublasCreate(&cublas_handle_);",
            id="cuBLAS, issue 16512",
        ),
        pytest.param(
            f"{FAIL}{RUNNING} Conv node. Name:'c' Status Message: CUDNN failure 4: "
            "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; GPU=0",
            id="cuDNN 9, cudnn_graph.h",
        ),
    ],
)
def test_lack_of_memory_is_recognised(text):
    """A text about memory is a lack of memory, though it may name a failure of CUDA."""
    failure = run_failure(RuntimeError(text))

    assert type(failure) is OutOfMemory
    assert str(failure).startswith("onnx runtime error ")


def test_failed_allocation_in_python_is_a_lack_of_memory():
    """NumPy, and ONNX Runtime's binding, raise Python's own error."""
    assert type(run_failure(MemoryError("std::bad_alloc"))) is OutOfMemory
    assert type(run_failure(MemoryError())) is OutOfMemory


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            f"{FAIL}CUDA failure 719: unspecified launch failure ; GPU=0 ; hostname=h ; file=gpu_data_transf"
            "er.cc ; line=73 ; expr=cudaMemcpyAsync(dst_data, src_data, bytes, cudaMemcpyDeviceToHost, s);",
            id="failed kernel, roop-unleashed issue 32",
        ),
        pytest.param(
            f"{CALL}CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=h ; "
            "file=cuda_execution_provider.cc ; line=448 ; expr=cudaStreamSynchronize(stream_);",
            id="illegal address, pykeio/ort issue 321",
        ),
        pytest.param(
            f"{CALL}CUDA failure 999: unknown error ; GPU=192915439 ; expr=cudaSetDevice(info_.device_id);",
            id="unknown error, issue 14211",
        ),
        pytest.param(
            f"{CALL}CUDA failure 100: no CUDA-capable device is detected ; GPU=32712 ; hostname=h",
            id="no device, issue 11561",
        ),
        pytest.param(
            f"{FAIL}{RUNNING} Conv node. Name:'/conv1/Conv' Status Message: CUDNN failure 5000: "
            "CUDNN_STATUS_EXECUTION_FAILED ; GPU=0 ; hostname=h ; file=conv.cc ; line=493 ;",
            id="cuDNN, issue 23497",
        ),
        pytest.param(
            f"{FAIL}{RUNNING} Conv node. Name:'root_conv2d' Status Message: CUDNN failure 1001: "
            "CUDNN_STATUS_NOT_INITIALIZED ; GPU=0 ; hostname=h ; file=conv.cc ; line=467",
            id="cuDNN not initialised, ComfyUI issue 5562",
        ),
        pytest.param(
            f"{FAIL}{RUNNING} Conv node. Name:'Conv_0' Status Message: CUDNN_FE failure 11: "
            "CUDNN_BACKEND_API_FAILED ; GPU=0 ; hostname=h ; file=conv.cc ; line=483",
            id="cuDNN frontend, issue 23301",
        ),
        pytest.param(
            f"{FAIL}{RUNNING} TRTKernel_graph_main_graph_3554867279417518500_0 node. Name:'TRTKernel"
            "_graph_0' Status Message: TensorRT EP execution context enqueue failed.",
            id="TensorRT, VSGAN-tensorrt-docker issue 74",
        ),
    ],
)
def test_broken_device_is_recognised(text):
    failure = run_failure(RuntimeError(text))

    assert type(failure) is DeviceFailed
    assert str(failure).startswith("unavailable: device failed: onnx runtime error 1: ")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            f"{INVALID}Got invalid dimensions for input: CUDA failure 700: x for the following indices",
            id="text from the request",
        ),
        pytest.param(f"{FAIL}{CALL}CUDA failure 1: invalid argument ; GPU=0", id="invalid argument"),
        pytest.param(
            f"{FAIL}CUDA failure 209: no kernel image is available for execution on the device",
            id="built for other devices",
        ),
        pytest.param(
            f"{FAIL}{RUNNING} Conv node. Name:'c' Status Message: CUDNN failure 3000: "
            "CUDNN_STATUS_NOT_SUPPORTED ; GPU=0",
            id="not supported",
        ),
        pytest.param(
            f"{FAIL}CUDNN failure 3: CUDNN_STATUS_BAD_PARAM ; GPU=0", id="bad parameter, issue 1606"
        ),
        pytest.param(
            f"{EXCEPTION}{RUNNING} Reshape node. Name:'r' Status Message: cannot be reshaped",
            id="reshape",
        ),
    ],
)
def test_other_failures_stay_those_of_the_run(text):
    assert type(run_failure(RuntimeError(text))) is RuntimeFailed

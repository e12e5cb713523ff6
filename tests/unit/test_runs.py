"""Runs of a network: at load, their threads, kinds of failures, and buffers that are bound once."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from nereid.base import errors
from nereid.base.config.model_config import ModelConfig
from nereid.base.processes import available_cores
from nereid.vision.inference.io_binding import CudaGraphRuns
from nereid.vision.inference.run_failures import run_failure
from nereid.vision.inference.run_sizes import ThreadCounts, thread_counts, warm_batch_sizes
from nereid.vision.inference.session import Session, SessionEvents
from tests.faulty_networks import FRAGILE_IO, CUDADriverError, CUDARuntimeError, fragile
from tests.networks import ONE_INSTANCE, identity, parameter, store, tensor, written
from tests.tables import cases

warming = partial(parameter, "nereid.warm_batch_sizes")


def config(parameters: dict[str, str], max_batch_size: int) -> ModelConfig:
    entries = {name: {"string_value": text} for name, text in parameters.items()}
    return ModelConfig.from_document({"max_batch_size": max_batch_size, "parameters": entries}, Path("m"), 1)


@cases(
    powers_of_two=({}, 8, True, [1, 2, 4, 8]),
    and_the_largest=({}, 12, True, [1, 2, 4, 8, 12]),
    no_batches=({}, 0, True, [1]),
    divided_batches=({"nereid.run_batch_size": "2"}, 8, True, [1, 2]),
    given=({"nereid.warm_batch_sizes": "3, 8"}, 8, True, [3, 8]),
    turned_off=({"nereid.warm_batch_sizes": ""}, 8, True, []),
    providers_without_a_slow_first_run=({}, 8, False, []),
)
def test_sizes_of_runs_at_load(parameters, max_batch_size, is_default, expected):
    assert warm_batch_sizes(config(parameters, max_batch_size), is_default) == expected


@pytest.mark.parametrize("sizes", ["9", "0", "two", "1 2"])
def test_sizes_outside_of_the_batches_fail_the_load(sizes):
    with pytest.raises(errors.InvalidConfig, match=f"numbers from 1 to 8 with commas, got '{sizes}'"):
        warm_batch_sizes(config({"nereid.warm_batch_sizes": sizes}, 8), is_default=False)


def opened(folder, model, text: str) -> tuple[list[float], list[int]]:
    """Open a network; returns the seconds of its runs at load, and the rows of its other runs."""
    warmed, ran = [], []
    store(folder, "m", model, text + ONE_INSTANCE)
    Session.from_config(
        ModelConfig.from_file(folder / "m", 1),
        events=SessionEvents(on_run=lambda seconds, rows: ran.append(rows), on_warmup=warmed.append),
    )
    return warmed, ran


@pytest.mark.parametrize("datatype", ["FP32", "FP16", "INT8", "BOOL", "STRING"])
def test_network_is_run_at_load(tmp_path, datatype):
    io = tensor("input", "x", datatype, [3]) + tensor("output", "y", datatype, [3])
    model = identity(datatype, ["N", 3])

    warmed, ran = opened(tmp_path, model, "max_batch_size: 8\n" + io + warming("1,2,8"))

    assert len(warmed) == 3
    assert np.all(np.array(warmed) > 0)
    assert ran == []


VARIABLE = "max_batch_size: 8\n" + tensor("input", "x", "FP32", [-1]) + tensor("output", "y", "FP32", [-1])


@cases(
    variable_dim=(identity("FP32", ["N", "M"]), VARIABLE, r"expected inputs of fixed dims, got 'x' \[-1\]"),
    failing_run=(fragile(), FRAGILE_IO, r"run of 1 row\(s\) of zeros at load: unavailable"),
)
def test_run_that_is_impossible_fails_the_load(model, io, message, tmp_path):
    with pytest.raises(errors.InvalidConfig, match=message):
        opened(tmp_path, model, io + warming("1"))


INTRA, INTER = "intra_op_thread_count", "inter_op_thread_count"


def test_cores_are_those_of_the_affinity():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


@cases(
    explicit=({INTRA: "3"}, 1000, "CPU", ThreadCounts(3, 0)),
    digits_and_letters=({INTRA: " 4abc"}, 1, "CPU", ThreadCounts(4, 0)),
    more_instances_than_cores=({}, 1000, "CPU", ThreadCounts(1, 0)),
    negative=({INTRA: "-5", INTER: "-5"}, 1000, "CPU", ThreadCounts(1, 0)),
    kind_model=({}, 1000, "MODEL", ThreadCounts(1, 0)),
    gpu=({}, 1, "GPU", ThreadCounts(0, 0)),
    explicit_on_gpu=({INTRA: "3", INTER: "2"}, 1, "GPU", ThreadCounts(3, 2)),
)
def test_thread_counts(parameters, instances, kind, expected):
    assert thread_counts(parameters, instances, kind) == expected


@pytest.mark.parametrize(("instances", "share"), [(0, 1.0), (1, 1.0), (2, 0.5), (3, 1 / 3)])
def test_instances_share_the_cores(instances, share):
    expected = max(1, int(available_cores() * share + 1e-9))

    assert thread_counts({}, instances) == ThreadCounts(expected, 0)


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
    assert type(run_failure(kind(1, "invalid argument"))) is errors.RuntimeFailed


def test_failed_allocation_in_python_is_a_lack_of_memory():
    """NumPy, and ONNX Runtime's binding, raise Python's own error."""
    assert type(run_failure(MemoryError("std::bad_alloc"))) is errors.OutOfMemory
    assert type(run_failure(MemoryError())) is errors.OutOfMemory


LACK = errors.OutOfMemory, "onnx runtime error "
BROKEN = errors.DeviceFailed, "unavailable: device failed: onnx runtime error 1: "
OTHER = errors.RuntimeFailed, ""


@cases(
    arena_issue_22702=(LACK, f"{EXCEPTION}{NODE}\n{ARENA} Failed to allocate memory for requested buffer"),
    without_an_arena_ONNX_Runtime_1_31=(LACK, f"{EXCEPTION}{NODE}std::bad_alloc"),
    gpu_mem_limit=(LACK, f"{FAIL}{NODE}{ARENA} Available memory of 3 is smaller than requested bytes of 9"),
    CUDA_Deep_Live_Cam_issue_584=(LACK, f"{FAIL}{CALL}CUDA failure 2: out of memory ; GPU=0 ; hostname=h"),
    cuBLAS_issue_16512=(LACK, f"{EXCEPTION}{NODE}{CALL}CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0"),
    cuDNN_9=(LACK, f"{FAIL}{NODE}CUDNN failure 4: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ;"),
    failed_kernel_roop_unleashed_issue_32=(BROKEN, f"{FAIL}CUDA failure 719: unspecified launch failure ;"),
    illegal_address_pykeio_ort_issue_321=(
        BROKEN,
        f"{CALL}CUDA failure 700: an illegal memory access ; GPU=0",
    ),
    unknown_error_issue_14211=(BROKEN, f"{CALL}CUDA failure 999: unknown error ; GPU=192915439"),
    no_device_issue_11561=(BROKEN, f"{CALL}CUDA failure 100: no CUDA-capable device is detected ; GPU=32712"),
    cuDNN_issue_23497=(BROKEN, f"{FAIL}{NODE}CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED ; GPU=0"),
    ComfyUI_issue_5562=(BROKEN, f"{FAIL}{NODE}CUDNN failure 1001: CUDNN_STATUS_NOT_INITIALIZED ; GPU=0"),
    cuDNN_frontend_issue_23301=(BROKEN, f"{FAIL}{NODE}CUDNN_FE failure 11: CUDNN_BACKEND_API_FAILED ; GPU=0"),
    TensorRT_VSGAN_issue_74=(BROKEN, f"{FAIL}{NODE}TensorRT EP execution context enqueue failed."),
    text_from_the_request=(OTHER, f"{INVALID}Got invalid dimensions for input: CUDA failure 700: x for"),
    invalid_argument=(OTHER, f"{FAIL}{CALL}CUDA failure 1: invalid argument ; GPU=0"),
    built_for_other_devices=(OTHER, f"{FAIL}CUDA failure 209: no kernel image is available on the device"),
    not_supported=(OTHER, f"{FAIL}{NODE}CUDNN failure 3000: CUDNN_STATUS_NOT_SUPPORTED ; GPU=0"),
    bad_parameter_issue_1606=(OTHER, f"{FAIL}CUDNN failure 3: CUDNN_STATUS_BAD_PARAM ; GPU=0"),
    reshape=(OTHER, f"{EXCEPTION}{RUNNING} Reshape node. Name:'r' Status Message: cannot be reshaped"),
)
def test_failure_of_a_run_has_its_kind(kind, text):
    """A text about memory is a lack of memory, though it may name a failure of CUDA."""
    failure = run_failure(RuntimeError(text))

    assert (type(failure), str(failure).startswith(kind[1])) == (kind[0], True)


OPTIONS = onnxruntime.RunOptions()


@pytest.fixture(scope="module")
def session():
    io = "(float[N,M] x) => (float[N,M] y, float[N] total) <int64[1] axes = {1}>"
    model = written(f"{io} {{ y = Add(x, x) total = ReduceSum<keepdims = 0>(x, axes) }}")
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def rows(count: int, first: float = 0) -> np.ndarray:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3) + np.float32(first)


class Counting:
    def __init__(self) -> None:
        self.shapes = []

    def zeros(self, shape, dtype):
        self.shapes.append(shape)
        return np.zeros(shape, dtype)

    def empty_like(self, array):
        self.shapes.append(array.shape)
        return np.empty_like(array)

    asarray, ascontiguousarray = staticmethod(np.asarray), staticmethod(np.ascontiguousarray)


@cases(filled_up_to_the_next_size=([4, 1], [4, 1, 5, 7]), recorded_by_number=([], [3, 2, 4, 1, 5, 7]))
def test_results_are_those_of_each_request(sizes, recorded, session):
    counting = Counting()
    run = CudaGraphRuns(counting, "cpu", 0, sizes=sizes)
    inputs = [rows(count, first) for first, count in enumerate([3, 2, 4, 1, 3, 5, 2])]
    inputs += [np.arange(42, dtype=np.float32).reshape(7, 6)[:, ::2]] * 2  # parts of a larger array

    results = [run(session, {"x": x}, ["total", "y"], OPTIONS) for x in inputs]

    for x, (total, y) in zip(inputs, results, strict=True):
        assert (y.dtype, total.dtype) == (np.float32, np.float32)
        np.testing.assert_array_equal(y, 2 * x)
        np.testing.assert_array_equal(total, x.sum(axis=1))
    assert counting.shapes == [shape for count in recorded for shape in ((count, 3), (count,), (count, 3))]


def test_output_without_a_row_for_each_input_is_refused(session):
    """The rows of a request could not be separated from those that fill up, and answers would be wrong."""
    model = written("(float[N,M] x) => (float[K,M] y) { y = Concat<axis = 0>(x, x) }")
    twice = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    message = r"'y' .*: expected 4 rows for 4 rows .*, got shape \[8, 3"
    with pytest.raises(errors.InferenceFailed, match=message):
        CudaGraphRuns(np, "cpu", 0, sizes=[4])(twice, {"x": rows(3)}, ["y"], OPTIONS)

    (y,) = CudaGraphRuns(np, "cpu", 0)(twice, {"x": rows(3)}, ["y"], OPTIONS)
    np.testing.assert_array_equal(y, np.concatenate([rows(3), rows(3)]))


def test_other_outputs_are_another_recording(session):
    run = CudaGraphRuns(np, "cpu", 0)

    (both, one) = (run(session, {"x": rows(2)}, names, OPTIONS) for names in (["y", "total"], ["total"]))

    assert [output.shape for output in both] == [(2, 3), (2,)]
    assert [output.shape for output in one] == [(2,)]


def test_number_of_recordings_is_limited(session):
    counting = Counting()
    run = CudaGraphRuns(counting, "cpu", 0, max_graphs=2)

    for count in (1, 2, 3, 4, 3):
        (y,) = run(session, {"x": rows(count)}, ["y"], OPTIONS)
        np.testing.assert_array_equal(y, 2 * rows(count))

    assert counting.shapes == [(1, 3), (1, 3), (2, 3), (2, 3)]

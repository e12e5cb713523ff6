"""Runs on a GPU: the same results as on the host, with inputs and outputs on the device."""

import numpy as np
import onnxruntime
import pytest

from nereid.inference import io_binding as gpu
from nereid.inference.session_options import CPU, CUDA
from tests.networks import identity, sample, store

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy(cupy):
    """CuPy, where there is a GPU that ONNX Runtime can use."""
    if CUDA not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider")
    return cupy


@pytest.fixture
def run(tmp_path, cupy):
    """Run y = x of a datatype on device 0: `run(datatype, x)`."""

    def run_identity(datatype: str, x):
        path = store(tmp_path, datatype, identity(datatype, ["n", "m"]))
        session = onnxruntime.InferenceSession(path, providers=[(CUDA, {"device_id": "0"}), CPU])
        (y,) = gpu.run(session, {"x": x}, ["y"], onnxruntime.RunOptions(), 0)
        return y

    return run_identity


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (2, 0)], ids=str)
@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT32", "INT64", "FP16", "FP32", "FP64"])
def test_answer_stays_on_the_device(cupy, run, datatype, shape):
    """Values, datatype and shape are those that went in, and nothing came back to the host."""
    x = sample(datatype, shape, np.random.default_rng(0))

    y = run(datatype, cupy.asarray(x))

    assert (type(y), y.dtype, y.shape, y.flags.c_contiguous) == (cupy.ndarray, x.dtype, x.shape, True)
    np.testing.assert_array_equal(y.get(), x)


def test_input_from_the_host_is_fetched(cupy, run):
    """A NumPy array is copied to the device by ONNX Runtime."""
    x = np.arange(6, dtype=np.float32).reshape(2, 3)

    y = run("FP32", x)

    assert isinstance(y, cupy.ndarray)
    np.testing.assert_array_equal(y.get(), x)


def test_capability_is_written_as_in_a_config(cupy):
    """`cc_model_filenames` has a dot between major and minor."""
    major, dot, minor = gpu.compute_capability(0).partition(".")

    assert (major.isdigit(), dot, minor.isdigit()) == (True, ".", True)

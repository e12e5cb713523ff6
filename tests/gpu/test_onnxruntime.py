"""Runs on a GPU: the same results as on the host, with inputs and outputs on the device."""

import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import onnxruntime
import pytest

from loadtest.gpu_check import chain, precisions
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import ServingError
from nereid.vision.inference import io_binding as gpu
from nereid.vision.inference.session import Session, SessionEvents
from nereid.vision.inference.session_options import CPU, CUDA, CUDA_GRAPHS, BackendSettings
from nereid.vision.inference.tensorrt import TENSORRT
from tests.networks import identity, sample, store

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cupy(cupy):
    if CUDA not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider")
    return cupy


@pytest.fixture
def run(tmp_path, cupy):
    def run_identity(datatype: str, x):
        path = store(tmp_path, datatype, identity(datatype, ["n", "m"]))
        session = onnxruntime.InferenceSession(path, providers=[(CUDA, {"device_id": "0"}), CPU])
        (y,) = gpu.run(session, {"x": x}, ["y"], onnxruntime.RunOptions(), 0)
        return y

    return run_identity


@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (2, 0)], ids=str)
@pytest.mark.parametrize("datatype", ["BOOL", "UINT8", "INT32", "INT64", "FP16", "FP32", "FP64"])
def test_answer_stays_on_the_device(cupy, run, datatype, shape):
    x = sample(datatype, shape, np.random.default_rng(0))

    y = run(datatype, cupy.asarray(x))

    assert (type(y), y.dtype, y.shape, y.flags.c_contiguous) == (cupy.ndarray, x.dtype, x.shape, True)
    np.testing.assert_array_equal(y.get(), x)


def test_input_from_the_host_is_fetched(cupy, run):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)

    y = run("FP32", x)

    assert isinstance(y, cupy.ndarray)
    np.testing.assert_array_equal(y.get(), x)


ROWS, SIZES = 64, (1, 8, 1, 64, 8)
HEURISTIC = {"cudnn_conv_algo_search": "HEURISTIC"}
# The first limit that holds half a batch, but no whole one, is the one to test.
LIMITS_MIB = (160, 224, 320, 448, 640, 896, 1280)


def opened(config: ModelConfig, events: SessionEvents | None = None) -> Session:
    """Open a network as the backend does, without runs at load."""
    config = config.with_parameters({"nereid.warm_batch_sizes": ""})
    return Session.from_config(config, BackendSettings(profile=chain.PROFILE), 1, events)


def accelerated(name: str, options: dict[str, str]) -> ModelConfig:
    """Return the default network's config with one accelerator, and these options in place of its own."""
    config = chain.gpu_config(chain.NETWORK)
    accelerators = {"gpu_execution_accelerator": [{"name": name, "parameters": options}]}
    document = {**config.document, "optimization": {"execution_accelerators": accelerators}}
    return replace(config, document=document).with_parameters({CUDA_GRAPHS: "false"})


def scores(session: Session, rows: np.ndarray) -> np.ndarray:
    (output,) = session.run({chain.INPUT: rows}, [chain.SCORES])
    return np.asarray(output.get() if session.is_on_gpu else output)


@pytest.fixture(scope="module")
def rows(cupy) -> np.ndarray:
    shades = np.linspace(0.5, 1, ROWS, dtype=np.float32).reshape(-1, 1, 1, 1)
    photos = precisions.inputs()
    return np.resize(photos, (ROWS, *photos.shape[1:])) * shades


@pytest.fixture(scope="module")
def expected(rows) -> np.ndarray:
    return scores(opened(replace(chain.gpu_config(chain.NETWORK), device_kind="CPU")), rows)


def check_alternating(session: Session, rows: np.ndarray, expected: np.ndarray) -> None:
    """Run sizes in turn, each with another first row: cuDNN may choose another algorithm for each."""
    for number, size in enumerate(SIZES):
        order = (np.arange(size) + number) % len(rows)
        np.testing.assert_allclose(scores(session, rows[order]), expected[order], rtol=0, atol=0.01)


def test_graphs_of_several_sizes_have_the_scores_of_the_host(rows, expected):
    session = opened(accelerated("cuda", {**HEURISTIC, "enable_cuda_graph": "1"}))

    check_alternating(session, rows, expected)


def test_batch_that_exceeds_the_limit_is_run_in_halves(rows, expected):
    """One of the limits holds half a batch only, and its scores are those of the host."""
    tried = []
    for limit_mib in LIMITS_MIB:
        limit = {"arena_extend_strategy": "kSameAsRequested", "gpu_mem_limit": str(limit_mib * 2**20)}
        halved: list[int] = []
        events = SessionEvents(on_batch_halved=partial(halved.append, 1))
        config = accelerated("cuda", {**HEURISTIC, **limit})
        try:
            output = scores(opened(config, events), rows)
        except ServingError as error:
            tried.append(f"{limit_mib} MiB: {error}")
            continue
        np.testing.assert_allclose(output, expected, rtol=0, atol=0.01)
        if halved:
            return
        tried.append(f"{limit_mib} MiB: not in halves")
    pytest.fail("; ".join(tried))


def test_second_load_with_tensorrt_reads_the_engine_of_the_first(rows, expected, tmp_path):
    pytest.importorskip("tensorrt", reason="needs TensorRT")
    if TENSORRT not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no TensorRT provider")
    config = accelerated("tensorrt", {})
    folder = tmp_path / "repository" / config.name
    shutil.copytree(config.folder / str(config.version), folder / str(config.version))

    engines = []
    for _ in range(2):
        check_alternating(opened(replace(config, folder=folder)), rows, expected)
        engines.append({engine.name: engine.stat().st_mtime_ns for engine in tmp_path.rglob("*.engine")})

    assert engines[0]
    assert engines[1] == engines[0]

"""Sessions from a config: options as NVIDIA's backend reads them, batches split and joined without loss."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from python_backend.errors import InferenceFailed, InvalidConfig
from python_backend.model_config import ModelConfig
from python_backend.session import Session, session_options


@pytest.fixture
def make_config(tmp_path):
    """Build a model folder with y = 2 x, float32[N, 3], and its config with extra lines of pbtxt."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "double",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def make(extra: str = "", inputs: str = "x", outputs: str = "y") -> ModelConfig:
        folder = tmp_path / "double"
        (folder / "1").mkdir(parents=True)
        onnx.save(model, folder / "1" / "model.onnx")
        (folder / "config.pbtxt").write_text(
            f'name: "double" max_batch_size: 8 input {{ name: "{inputs}" data_type: TYPE_FP32 dims: [3] }}'
            f' output {{ name: "{outputs}" data_type: TYPE_FP32 dims: [3] }} {extra}'
        )
        return ModelConfig.from_file(folder, 1)

    return make


def parameter(key: str, value: str) -> str:
    """Write one parameter as pbtxt."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


@pytest.mark.parametrize("run_batch_size", [0, 1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[1], [5], [1, 1, 1], [2, 3, 1], [8]], ids=str)
def test_every_request_gets_its_own_rows(make_config, run_batch_size, sizes):
    """However requests are joined and split, each gets the answer it would get alone."""
    session = Session.from_config(make_config(parameter("nereid.run_batch_size", str(run_batch_size))))
    requests = [[np.random.default_rng(i).random((n, 3), np.float32)] for i, n in enumerate(sizes)]

    answers = session.run_requests(["x"], requests, ["y"])

    for (x,), (y,) in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(y, 2 * x)


@pytest.mark.parametrize(("run_batch_size", "failed"), [(0, [0, 1]), (1, [1])], ids=["joined", "split"])
def test_failure_hits_only_what_ran_together(make_config, run_batch_size, failed):
    """A request that the runtime refuses takes down its own run, not the others."""
    session = Session.from_config(make_config(parameter("nereid.run_batch_size", str(run_batch_size))))
    good, bad = np.zeros((1, 3), np.float32), np.zeros((1, 3), np.float64)

    answers = session.run_requests(["x"], [[good], [bad]], ["y"])

    assert [i for i, answer in enumerate(answers) if isinstance(answer, InferenceFailed)] == failed


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (None, "ORT_ENABLE_ALL"),
        (0, "ORT_ENABLE_ALL"),
        (-1, "ORT_ENABLE_BASIC"),
        (1, "ORT_ENABLE_EXTENDED"),
        (2, "ORT_DISABLE_ALL"),
        (7, "ORT_ENABLE_ALL"),
    ],
)
def test_graph_level_is_tritons_numbering(make_config, level, expected):
    """Triton's levels are not ONNX Runtime's: 2 disables all."""
    extra = "" if level is None else f"optimization {{ graph {{ level: {level} }} }}"

    options = session_options(make_config(extra))

    assert options.graph_optimization_level == getattr(onnxruntime.GraphOptimizationLevel, expected)


def test_thread_counts_and_mode_are_passed_on(make_config):
    """The three execution parameters reach ONNX Runtime."""
    extra = " ".join(
        parameter(*pair)
        for pair in [("intra_op_thread_count", "3"), ("inter_op_thread_count", "2"), ("execution_mode", "1")]
    )

    options = session_options(make_config(extra))

    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 2)
    assert options.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("intra_op_thread_count", "abc", "failed to convert 'abc' to integral number"),
        ("execution_mode", "2", "Expected values for  execution_mode are 0 or 1 but got 2 ."),
    ],
)
def test_wrong_value_has_the_official_message(make_config, key, value, message):
    """Log greps written for NVIDIA's backend keep working."""
    with pytest.raises(InvalidConfig, match=message):
        session_options(make_config(parameter(key, value)))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"inputs": "z"}, "unexpected inference input 'z', allowed inputs are: x"),
        ({"outputs": "z"}, "unexpected inference output 'z', allowed outputs are: y"),
    ],
    ids=["input", "output"],
)
def test_unknown_tensor_fails_the_load(make_config, names, message):
    """A config that names a tensor the file does not have is refused with the official message."""
    with pytest.raises(InvalidConfig, match=message):
        Session.from_config(make_config(**names))


def test_missing_file_fails_the_load(make_config):
    """A version without its model file is refused with the path."""
    config = make_config()
    (config.folder / "1" / "model.onnx").unlink()

    with pytest.raises(InvalidConfig, match=r"unable to find '.*/1/model\.onnx' for model instance 'double'"):
        Session.from_config(config)


def test_damaged_file_fails_the_load(make_config):
    """A file that is no ONNX model is refused with its path."""
    config = make_config()
    (config.folder / "1" / "model.onnx").write_bytes(b"no protobuf")

    with pytest.raises(InvalidConfig, match=r"onnx runtime cannot load '.*/1/model\.onnx'"):
        Session.from_config(config)

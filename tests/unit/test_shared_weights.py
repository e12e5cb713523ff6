"""Weights in a file that all instances map: written once and atomically, and named by content."""

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest

from nereid.base import files
from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InvalidConfig
from nereid.vision.inference import network_file, session_options, shared_weights, version_state
from nereid.vision.inference.session import Session
from tests.networks import store, tensor, value, written
from tests.tables import cases


@pytest.fixture
def path(tmp_path):
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model = written("(float[n,64] x) => (float[n,64] y) { y = MatMul(x, A) }", A=weights)
    io = tensor("input", "x", "FP32", [-1, 64]) + tensor("output", "y", "FP32", [-1, 64])
    # The copies are kept next to the repository, which must be in the folder of the test, too.
    return store(tmp_path / "models", "product", model, io, weights="data.bin")


@pytest.fixture
def opened(path):
    config = ModelConfig.from_file(path.parents[1], 1)

    def open_instance(filename="model.onnx", **changes) -> onnxruntime.InferenceSession:
        settings = replace(session_options.session_settings(config), **changes)
        return shared_weights.open_shared(path.with_name(filename), place(path), settings, opener)

    def opener(file, settings):
        open_instance.paths.append(file)
        return onnxruntime.InferenceSession(file, settings.options, providers=list(settings.providers))

    open_instance.paths = []
    return open_instance


def place(path):
    return version_state.folder_of(path.parents[1], int(path.parent.name), shared_weights.FOLDER)


def copies(path) -> list:
    return sorted(place(path).iterdir())


def test_instance_waits_while_another_one_writes(path, opened):
    """The files are read only under the lock: a change before that belongs to the copy."""
    with ThreadPoolExecutor() as pool:
        with files.locked_folder(path.parent):
            opening = pool.submit(opened)
            time.sleep(0.3)
            path.with_name("notes.txt").write_text("new")
        opening.result()
    opened()

    assert len(copies(path)) == 1


def test_first_instance_writes_and_all_open_the_copy(path, opened):
    """The model itself is opened once, to write the copy that every instance then runs."""
    inputs = {"x": np.ones((2, 64), np.float32)}
    expected = onnxruntime.InferenceSession(path, providers=[session_options.CPU]).run(None, inputs)

    answers = [opened().run(None, inputs), opened().run(None, inputs)]

    (copy,) = copies(path)
    assert opened.paths == [path, copy / "model.onnx", copy / "model.onnx"]
    np.testing.assert_array_equal(answers, [expected, expected])
    assert (copy / "weights.bin").stat().st_size >= 64 * 64 * 4


def test_changed_weights_get_a_copy_of_their_own(path, opened):
    opened()
    data = path.with_name("data.bin")
    data.write_bytes(bytes(len(data.read_bytes())))

    (answer,) = opened().run(None, {"x": np.ones((1, 64), np.float32)})

    assert len(copies(path)) == 2
    np.testing.assert_array_equal(answer, np.zeros((1, 64), np.float32))


@cases("changes", entry={"extras": ("other.so",)}, file={"filename": "other.onnx"})
def test_other_session_gets_a_copy_of_its_own(path, opened, changes):
    shutil.copy(path, path.with_name("other.onnx"))
    opened()

    opened(**changes)

    assert len(copies(path)) == 2


def test_half_written_copy_is_replaced(path, opened):
    opened()
    (copy,) = copies(path)
    copy.rename(f"{copy}.partial")
    (copy.parent / f"{copy.name}.partial" / "weights.bin").write_bytes(b"half")

    opened().run(None, {"x": np.ones((1, 64), np.float32)})

    assert copies(path) == [copy]


def test_old_copies_are_removed(path, opened):
    opened()
    (old,) = copies(path)
    opened(extras=("session.disable_prepacking=1",))
    os.utime(old, (0, 0))
    opened()
    assert len(copies(path)) == 2

    os.utime(old, (0, 0))
    opened(extras=("other.so",))

    assert old not in copies(path)
    assert len(copies(path)) == 2


def test_instance_that_cannot_share_has_its_own_weights_unless_sharing_is_required(path):
    place(path).parent.mkdir(parents=True)
    place(path).write_text("a file where a folder should be")
    backend = session_options.BackendSettings(shares_weights=True)
    config = ModelConfig.from_file(path.parents[1], 1)
    reason = "expected a writable folder"

    session = Session.from_config(config, backend)

    assert session.run({"x": np.ones((1, 64), np.float32)}, ["y"])[0].shape == (1, 64)
    assert f"each with its own weights: {session_options.SHARED_WEIGHTS}: {reason}" in str(session)
    with pytest.raises(InvalidConfig, match=reason):
        Session.from_config(replace(config, parameters={session_options.SHARED_WEIGHTS: "true"}), backend)


def test_weights_on_a_gpu_are_refused(opened):
    """Processes cannot map memory of a GPU."""
    message = f"nereid.shared_weights: expected {session_options.CPU} only, got {session_options.CUDA}"
    with pytest.raises(InvalidConfig, match=message):
        opened(providers=((session_options.CUDA, {}), (session_options.CPU, {})))


def linear(rows: int, columns: int, op: str = "MatMul"):
    weights = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    width = columns if "transB" in op else rows
    return written(f"(float[n,{width}] x) => (float[n,?] y) {{ y = {op}(x, A) }}", A=weights)


def recurrent(op: str, gates: int, hidden: int):
    random = np.random.default_rng(0)
    widths = {"W": 33, "R": hidden}
    shapes = {name: (1, gates * hidden, width) for name, width in widths.items()}
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    io = f"(float[1,n,33] x) => (float[1,1,n,{hidden}] y)"
    return written(f"{io} {{ y = {op}<hidden_size = {hidden}>(x, W, R) }}", **weights)


def branch():
    """Return a network whose weights belong to the two branches of an If, and have odd sizes."""
    branches = []
    for name, columns in (("then", 37), ("else", 41)):
        weights = ", ".join(["0.5"] * 70 * columns)
        io = f"() => (float[n,{columns}] {name}_y) <float[70,{columns}] {name}_A = {{{weights}}}>"
        branches.append(f"{name}_branch = {name} {io} {{ {name}_y = MatMul(x, {name}_A) }}")
    chosen = "m = ReduceMax<keepdims = 0>(x) c = Cast<to = 9>(m)"
    return written(f"(float[n,70] x) => (float[n,?] y) {{ {chosen} y = If(c)<{', '.join(branches)}> }}")


def old(nodes: str, **constants: np.ndarray) -> onnx.ModelProto:
    """Build y[n, 4] of x[n, 4] as exporters before 2019 did: IR 3, and initializers that are inputs, too."""
    model = written(f"(float[n,4] x) => (float[n,4] y) {{ {nodes} }}", **constants)
    model.graph.input.extend(value(name, "FP32", array.shape) for name, array in constants.items())
    model.ir_version = 3
    return model


def folded(nodes: str, **constants: np.ndarray) -> onnx.ModelProto:
    """Build y[a, b] of x[2, 4], whose dims are known only when constants are folded."""
    return written(f"(float[2,4] x) => (float[a,b] y) {{ {nodes} }}", **constants)


GEMMS = "p = Gemm (x, w, a) q = Gemm (p, w, b) y = Gemm (q, w, c)"
GATHER = "r = Range (a, b, c) y = Gather <axis = 1> (x, r)"
SQUARE, ZEROS = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), np.zeros(4, np.float32)


@cases(
    "model",
    MatMul=linear(70, 37),
    small=linear(130, 10),
    wide=linear(7, 300),
    Gemm=linear(37, 70, "Gemm<transB = 1>"),
    LSTM=recurrent("LSTM", 4, 37),
    GRU=recurrent("GRU", 3, 19),
    If=branch(),
    three_equal_biases=old(GEMMS, w=SQUARE, a=ZEROS, b=ZEROS, c=ZEROS),
    unused_weights=old("y = Relu (x)", w=SQUARE),
    input_with_a_default=old("y = Add (x, b)", b=ZEROS),
    shape_of_a_constant=folded("s = Shape (c) y = Reshape (x, s)", c=np.zeros((4, 2), np.float32)),
    range_of_constants=folded(GATHER, a=np.int64(0), b=np.int64(3), c=np.int64(1)),
)
def test_networks_of_any_kind_give_the_same_answers(tmp_path, model):
    """On the copy that ONNX Runtime writes itself, each of these kernels crashed, or lost its constants."""
    path = store(tmp_path / "models", "odd", model)
    shape = [dim.dim_value or 2 for dim in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    expected = onnxruntime.InferenceSession(path, providers=[session_options.CPU]).run(None, {"x": x})

    for _ in range(2):
        settings = session_options.session_settings(ModelConfig.from_file(path.parents[1], 1))
        session = shared_weights.open_shared(path, place(path), settings, network_file.open_file)
        np.testing.assert_array_equal(session.run(None, {"x": x}), expected)

"""Networks for tests that return embeddings, and classifiers whose scores look like embeddings."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper
from PIL import Image

from nereid.models.publish.add import AddRequest, add
from tests.networks import Dims, constant, network, value
from tests.pictures import save

SIDE, CHANNELS, DIMS = 32, 12, 64
Nodes = list[onnx.NodeProto]
# Turns the last Gemm's rows `raw` into `output`.
Tail = Callable[[], tuple[Nodes, list[onnx.TensorProto]]]


def _plain() -> tuple[Nodes, list[onnx.TensorProto]]:
    return [helper.make_node("Identity", ["raw"], ["output"])], []


def _operator(name: str) -> Tail:
    return lambda: ([helper.make_node(name, ["raw"], ["output"], axis=1)], [])


def _torch() -> tuple[Nodes, list[onnx.TensorProto]]:
    """As torch exports `F.normalize`: divided by the clipped length."""
    nodes = [
        helper.make_node("ReduceL2", ["raw"], ["length"], axes=[1], keepdims=1),
        helper.make_node("Clip", ["length", "least"], ["clipped"]),
        helper.make_node("Shape", ["raw"], ["shape"]),
        helper.make_node("Expand", ["clipped", "shape"], ["expanded"]),
        helper.make_node("Div", ["raw", "expanded"], ["output"]),
    ]
    return nodes, [constant("least", np.array(1e-12, np.float32))]


def _tensorflow() -> tuple[Nodes, list[onnx.TensorProto]]:
    """As tf2onnx exports `tf.math.l2_normalize`: multiplied by the inverse square root."""
    nodes = [
        helper.make_node("Mul", ["raw", "raw"], ["squares"]),
        helper.make_node("ReduceSum", ["squares", "axis"], ["sum"], keepdims=1),
        helper.make_node("Max", ["sum", "least"], ["clipped"]),
        helper.make_node("Sqrt", ["clipped"], ["length"]),
        helper.make_node("Reciprocal", ["length"], ["inverse"]),
        helper.make_node("Mul", ["raw", "inverse"], ["output"]),
    ]
    return nodes, [constant("least", np.array(1e-12, np.float32)), constant("axis", np.array([1]))]


def _positive() -> tuple[Nodes, list[onnx.TensorProto]]:
    """Features behind a ReLU, so that no component is negative."""
    nodes = [
        helper.make_node("Relu", ["raw"], ["positive"]),
        helper.make_node("LpNormalization", ["positive"], ["output"], axis=1, p=2),
    ]
    return nodes, []


def _written_softmax() -> tuple[Nodes, list[onnx.TensorProto]]:
    """A softmax written out, so sure of one class that its rows have the length 1."""
    nodes = [
        helper.make_node("ReduceMax", ["raw"], ["largest"], axes=[1], keepdims=1),
        helper.make_node("Sub", ["raw", "largest"], ["moved"]),
        helper.make_node("Mul", ["moved", "sharpness"], ["sharp"]),
        helper.make_node("Exp", ["sharp"], ["powers"]),
        helper.make_node("ReduceSum", ["powers", "axis"], ["sum"], keepdims=1),
        helper.make_node("Div", ["powers", "sum"], ["output"]),
    ]
    return nodes, [constant("sharpness", np.array(1e4, np.float32)), constant("axis", np.array([1]))]


def _one_label(is_written: bool) -> Tail:
    """Sigmoids of which exactly one is 1: such a row has the length 1, too."""

    def tail() -> tuple[Nodes, list[onnx.TensorProto]]:
        nodes = [
            helper.make_node("Mul", ["raw", "nothing"], ["zeros"]),
            helper.make_node("Add", ["zeros", "logits"], ["sure"]),
        ]
        if is_written:
            nodes += [
                helper.make_node("Neg", ["sure"], ["negative"]),
                helper.make_node("Exp", ["negative"], ["powers"]),
                helper.make_node("Add", ["powers", "single"], ["denominator"]),
                helper.make_node("Div", ["single", "denominator"], ["output"]),
            ]
        else:
            nodes.append(helper.make_node("Sigmoid", ["sure"], ["output"]))
        logits = np.where(np.arange(DIMS) == 3, 12, -9).astype(np.float32)
        constants = {"nothing": np.array(0, np.float32), "single": np.array(1, np.float32), "logits": logits}
        return nodes, [constant(name, array) for name, array in constants.items()]

    return tail


def _cosines(scale: float) -> Tail:
    """A classifier by angles: cosines with the centres of the classes, as in ArcFace and CosFace."""

    def tail() -> tuple[Nodes, list[onnx.TensorProto]]:
        centres = np.random.default_rng(5).standard_normal((DIMS, DIMS)).astype(np.float32)
        centres *= scale / np.linalg.norm(centres, axis=0)
        nodes = [
            helper.make_node("LpNormalization", ["raw"], ["unit"], axis=1, p=2),
            helper.make_node("MatMul", ["unit", "centres"], ["output"]),
        ]
        return nodes, [constant("centres", centres)]

    return tail


# Networks whose rows have the length 1.
UNIT: Mapping[str, Tail] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "operator": lambda: ([helper.make_node("LpNormalization", ["raw"], ["output"], axis=1, p=2)], []),
    "positive": _positive,
}
# Networks that must never be taken for them.
SCORES: Mapping[str, Tail] = {
    "logits": _plain,
    "softmax": _operator("Softmax"),
    "log softmax": _operator("LogSoftmax"),
    "sure softmax, written out": _written_softmax,
    "one label": _one_label(False),
    "one label, written out": _one_label(True),
    "cosines": _cosines(1),
    "scaled cosines": _cosines(30),
}


def convolutional(
    tail: Tail = _plain,
    seed: int = 1,
    noise: float = 0.0,
    shape: Dims = ("N", 3, SIDE, SIDE),
    **metadata: str,
) -> onnx.ModelProto:
    """Build a small network of convolutions, a pooling and a Gemm, and the tail behind them.

    Args:
        tail: computes `output` from the Gemm's rows.
        seed: of the weights.
        noise: added to the weights of the Gemm, relative to them: a retrained network.
        shape: of the images.
        metadata: of the file.
    """
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((CHANNELS, 3, 3, 3)).astype(np.float32) / 3
    second = rng.standard_normal((2 * CHANNELS, CHANNELS, 3, 3)).astype(np.float32) / 6
    weights = rng.standard_normal((2 * CHANNELS, DIMS)).astype(np.float32)
    weights += noise * rng.standard_normal(weights.shape).astype(np.float32)
    nodes, more = tail()
    made = network(
        [
            helper.make_node("Conv", ["image", "first"], ["one"], strides=[2, 2], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["one"], ["two"]),
            helper.make_node("Conv", ["two", "second"], ["three"], strides=[2, 2], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["three"], ["four"]),
            helper.make_node("GlobalAveragePool", ["four"], ["means"]),
            helper.make_node("Flatten", ["means"], ["flat"], axis=1),
            helper.make_node("Gemm", ["flat", "weights", "bias"], ["raw"]),
            *nodes,
        ],
        [value("image", "FP32", shape)],
        [value("output", "FP32", [shape[0], DIMS])],
        [
            constant("first", first),
            constant("second", second),
            constant("weights", weights),
            constant("bias", rng.standard_normal(DIMS).astype(np.float32) / 4),
            *more,
        ],
    )
    helper.set_model_props(made, metadata)
    return made


def add_embedder(
    folder: Path, name: str = "faces", made: onnx.ModelProto | None = None, task: str = "embed"
) -> Path:
    """Add a network of embeddings to the repository `models` in a folder; return the repository."""
    onnx.save(made or convolutional(), folder / f"{name}.onnx")
    parameters = {"resize": "exact", "scale": str(1 / 255)}
    add(
        repository := folder / "models",
        AddRequest(folder / f"{name}.onnx", name, parameters, task=task),
        None,
    )
    return repository


def embeddings(made: onnx.ModelProto, *images: bytes) -> np.ndarray:
    """Run a network on images of its own size, and normalise in FP64: float64[N, D]."""
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in images])
    inputs = {"image": (pixels.transpose(0, 3, 1, 2) / 255).astype(np.float32)}
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    rows = session.run(None, inputs)[0].astype(np.float64)
    result: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return result


def small(photo: Path) -> bytes:
    """Return a photo in the network's own size, which the preprocessing leaves as it is."""
    with Image.open(photo) as opened:
        return save(opened.convert("RGB").resize((SIDE, SIDE)))


def cosine(one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray) -> float:
    left, right = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(left @ right / np.linalg.norm(left) / np.linalg.norm(right))

"""Networks for tests that return embeddings, and classifiers whose scores look like embeddings."""

import io
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import helper
from PIL import Image

from nereid.models.publish.add import AddRequest, add
from tests.networks import Dims, run, written
from tests.pictures import save

SIDE, CHANNELS, DIMS = 32, 12, 64
CENTRES = np.random.default_rng(5).standard_normal((DIMS, DIMS)).astype(np.float32)
CENTRES /= np.linalg.norm(CENTRES, axis=0)
# What the tails name.
CONSTANTS: Mapping[str, np.ndarray] = {
    "least": np.array(1e-12, np.float32),
    "columns": np.array([1]),
    "sharpness": np.array(1e4, np.float32),
    "nothing": np.array(0, np.float32),
    "single": np.array(1, np.float32),
    "sure": np.where(np.arange(DIMS) == 3, 12, -9).astype(np.float32),
    "centres": CENTRES,
    "scaled": CENTRES * 30,
}
# A tail turns the last Gemm's rows `raw` into `output`.
PLAIN = "output = Identity (raw)"
# Networks whose rows have the length 1.
UNIT = {
    # As torch exports `F.normalize`: divided by the clipped length.
    "torch": """
        length = ReduceL2 <axes = [1], keepdims = 1> (raw)
        clipped = Clip (length, least)
        shape = Shape (raw)
        expanded = Expand (clipped, shape)
        output = Div (raw, expanded)""",
    # As tf2onnx exports `tf.math.l2_normalize`: multiplied by the inverse square root.
    "tensorflow": """
        squares = Mul (raw, raw)
        sum = ReduceSum <keepdims = 1> (squares, columns)
        clipped = Max (sum, least)
        length = Sqrt (clipped)
        inverse = Reciprocal (length)
        output = Mul (raw, inverse)""",
    "operator": "output = LpNormalization <axis = 1, p = 2> (raw)",
    # Features behind a ReLU, so that no component is negative.
    "positive": "positive = Relu (raw) output = LpNormalization <axis = 1, p = 2> (positive)",
}
# Sigmoids of which exactly one is 1: such a row has the length 1, too.
ONE_LABEL = "zeros = Mul (raw, nothing) logits = Add (zeros, sure)"
# Cosines with the centres of the classes, as in ArcFace and CosFace: a classifier by angles.
ANGLES = "unit = LpNormalization <axis = 1, p = 2> (raw)"
# Networks that must never be taken for them.
SCORES = {
    "logits": PLAIN,
    "softmax": "output = Softmax <axis = 1> (raw)",
    "log softmax": "output = LogSoftmax <axis = 1> (raw)",
    # So sure of one class that its rows have the length 1.
    "sure softmax, written out": """
        largest = ReduceMax <axes = [1], keepdims = 1> (raw)
        moved = Sub (raw, largest)
        sharp = Mul (moved, sharpness)
        powers = Exp (sharp)
        sum = ReduceSum <keepdims = 1> (powers, columns)
        output = Div (powers, sum)""",
    "one label": f"{ONE_LABEL} output = Sigmoid (logits)",
    "one label, written out": f"""{ONE_LABEL}
        negative = Neg (logits)
        powers = Exp (negative)
        denominator = Add (powers, single)
        output = Div (single, denominator)""",
    "cosines": f"{ANGLES} output = MatMul (unit, centres)",
    "scaled cosines": f"{ANGLES} output = MatMul (unit, scaled)",
}


def convolutional(
    tail: str = PLAIN, seed: int = 1, noise: float = 0.0, shape: Dims = ("N", 3, SIDE, SIDE), **metadata: str
) -> onnx.ModelProto:
    """Build a small network of convolutions, a pooling and a Gemm, and the tail behind them.

    Args:
        tail: computes `output` from the Gemm's rows `raw`, in ONNX's text form.
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
    made = written(
        f"""(float[{",".join(map(str, shape))}] image) => (float[{shape[0]},{DIMS}] output) {{
            one = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (image, first)
            two = Relu (one)
            three = Conv <strides = [2, 2], pads = [1, 1, 1, 1]> (two, second)
            four = Relu (three)
            means = GlobalAveragePool (four)
            flat = Flatten <axis = 1> (means)
            raw = Gemm (flat, weights, bias)
            {tail}
        }}""",
        first=first,
        second=second,
        weights=weights,
        bias=rng.standard_normal(DIMS).astype(np.float32) / 4,
        **{name: array for name, array in CONSTANTS.items() if re.search(rf"\b{name}\b", tail)},
    )
    helper.set_model_props(made, metadata)
    return made


def add_embedder(folder: Path, made: onnx.ModelProto | None = None) -> Path:
    """Add a network of embeddings to the repository `models` in a folder; return the repository."""
    onnx.save(made or convolutional(), path := folder / "faces.onnx")
    parameters = {"resize": "exact", "scale": str(1 / 255)}
    add(repository := folder / "models", AddRequest(path, "faces", parameters, task="embed"), None)
    return repository


def embeddings(made: onnx.ModelProto, *images: bytes) -> np.ndarray:
    """Run a network on images of its own size, and normalise in FP64: float64[N, D]."""
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in images])
    inputs = {"image": (pixels.transpose(0, 3, 1, 2) / 255).astype(np.float32)}
    rows = run(made.SerializeToString(), inputs)["output"].astype(np.float64)
    result: np.ndarray = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return result


def small(photo: Path) -> bytes:
    """Return a photo in the network's own size, which the preprocessing leaves as it is."""
    with Image.open(photo) as opened:
        return save(opened.convert("RGB").resize((SIDE, SIDE)))

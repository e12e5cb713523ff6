"""Networks as users export them: every layout, datatype, batch, activation and number of channels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from tests.networks import written

CLASSES = 5
ELEMENTS = {"FP32": "float", "FP16": "float16", "UINT8": "uint8"}
LUMA = np.array([0.299, 0.587, 0.114])


@dataclass(frozen=True)
class UserNetwork:
    """A classifier: the mean of each channel, times weights; its reference in float64.

    `batch` and `side_px` are None for variable ones, `tail` counts the dims of 1 behind the classes, and
    `weights` is a seed. FP16 is also the datatype of the output.
    """

    layout: str = "NCHW"
    channels: int = 3
    datatype: str = "FP32"
    batch: int | None = None
    activation: str = "none"
    tail: int = 0
    side_px: int | None = 16
    weights: int = 1
    opset: int = 17
    ir_version: int = 8

    @property
    def _matrix(self) -> Any:
        rng = np.random.default_rng(self.weights)
        return (rng.standard_normal((self.channels, CLASSES)) * 3).astype(np.float32)

    @property
    def is_channels_last(self) -> bool:
        return self.layout == "NHWC"

    def shape(self) -> list[int | str | None]:
        sides = [self.side_px or "H", self.side_px or "W"]
        inner = [*sides, self.channels] if self.is_channels_last else [self.channels, *sides]
        return [self.batch if self.batch is not None else "N", *inner]

    def build(self) -> onnx.ModelProto:
        steps = {"means": "GlobalAveragePool", "flat": "Flatten <axis = 1>", "logits": "MatMul"}
        if self.is_channels_last:
            steps = {"planes": "Transpose <perm = [0, 3, 1, 2]>"} | steps
        if self.datatype == "UINT8":
            steps = {"floats": "Cast <to = 1>"} | steps
        if self.activation != "none":
            steps["activated"] = self.activation.title()
        if self.tail:
            steps["tailed"] = "Unsqueeze"
        more = {"logits": ", weights", "tailed": ", axes"}
        places = zip(steps, ["image", *steps], [*[*steps][:-1], "output"], strict=False)
        nodes = " ".join(f"{to} = {steps[name]} ({of}{more.get(name, '')})" for name, of, to in places)
        matrix = self._matrix.astype(np.float16 if self.datatype == "FP16" else np.float32)
        constants = {"weights": matrix * matrix.dtype.type(1 / 255 if self.datatype == "UINT8" else 1)}
        if self.tail:
            constants["axes"] = np.arange(2, 2 + self.tail)
        shape = [str(dim) for dim in self.shape()]
        out = [shape[0], str(CLASSES), *["1"] * self.tail]
        work = "float16" if self.datatype == "FP16" else "float"
        io = f"({ELEMENTS[self.datatype]}[{','.join(shape)}] image) => ({work}[{','.join(out)}] output)"
        return written(f"{io} {{ {nodes} }}", self.opset, self.ir_version, **constants)

    def logits(self, pixels: np.ndarray) -> Any:
        """Return the reference, float64[N, C]; a grey network also takes three channels."""
        planes = np.asarray(pixels, np.float64)
        planes = planes.transpose(0, 3, 1, 2) if self.is_channels_last else planes
        if self.channels == 1 and planes.shape[1] == 3:
            planes = np.einsum("nchw,c->nhw", planes, LUMA)[:, None]
            if self.datatype == "UINT8":
                planes = planes.round()
        scale = 1 / 255 if self.datatype == "UINT8" else 1
        return planes.mean((2, 3)) @ (self._matrix.astype(np.float64) * scale)

    def probabilities(self, pixels: np.ndarray, activation: str) -> Any:
        logits = self.logits(pixels)
        if activation == "sigmoid":
            return 1 / (1 + np.exp(-logits))
        if activation == "softmax":
            grown = np.exp(logits - logits.max(1, keepdims=True))
            return grown / grown.sum(1, keepdims=True)
        return logits

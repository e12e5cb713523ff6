"""Networks as users export them: every layout, datatype, batch, activation and number of channels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.networks import constant

CLASSES = 5
ELEMENTS = {"FP32": TensorProto.FLOAT, "FP16": TensorProto.FLOAT16, "UINT8": TensorProto.UINT8}
LUMA = np.array([0.299, 0.587, 0.114])


@dataclass(frozen=True)
class UserNetwork:
    """A classifier: the mean of each quadrant and channel, times weights; its reference in float64.

    Args:
        layout: NCHW or NHWC.
        channels: 3 or 1.
        datatype: of the input; FP16 is also that of the output.
        batch: the first dim; None for a variable one.
        activation: what the network itself applies: none, softmax or sigmoid.
        tail: extra dims of 1 behind the classes.
        side_px: height and width; None for variable ones.
        weights: the seed of the weights, so that two networks differ.
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
    def is_last(self) -> bool:
        return self.layout == "NHWC"

    def shape(self) -> list[int | str | None]:
        sides = [self.side_px or "H", self.side_px or "W"]
        inner = [*sides, self.channels] if self.is_last else [self.channels, *sides]
        return [self.batch if self.batch is not None else "N", *inner]

    def build(self) -> onnx.ModelProto:
        element = ELEMENTS[self.datatype]
        work = TensorProto.FLOAT16 if self.datatype == "FP16" else TensorProto.FLOAT
        nodes, last = [], "image"
        if self.datatype == "UINT8":
            nodes.append(helper.make_node("Cast", [last], ["float"], to=TensorProto.FLOAT))
            last = "float"
        if self.is_last:
            nodes.append(helper.make_node("Transpose", [last], ["planes"], perm=[0, 3, 1, 2]))
            last = "planes"
        nodes += [
            helper.make_node("GlobalAveragePool", [last], ["means"]),
            helper.make_node("Flatten", ["means"], ["flat"], axis=1),
            helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
        ]
        last = "logits"
        if self.activation != "none":
            operator = {"softmax": "Softmax", "sigmoid": "Sigmoid"}[self.activation]
            nodes.append(helper.make_node(operator, [last], ["activated"]))
            last = "activated"
        if self.tail:
            axes = constant("axes", np.arange(2, 2 + self.tail))
            nodes.append(helper.make_node("Unsqueeze", [last, "axes"], ["tailed"]))
            last = "tailed"
        nodes[-1].output[0] = "output"
        matrix = self._matrix.astype(np.float16 if self.datatype == "FP16" else np.float32)
        scale = 1 / 255 if self.datatype == "UINT8" else 1
        first = self.batch if self.batch is not None else "N"
        graph = helper.make_graph(
            nodes,
            "classifier",
            [helper.make_tensor_value_info("image", element, self.shape())],
            [helper.make_tensor_value_info("output", work, [first, CLASSES, *[1] * self.tail])],
            [constant("weights", matrix * matrix.dtype.type(scale)), *([axes] if self.tail else [])],
        )
        made = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=self.ir_version
        )
        if self.opset <= 26:
            onnx.checker.check_model(made)
        return made

    def logits(self, pixels: np.ndarray) -> Any:
        """Return the reference, float64[N, C]; a grey network also takes three channels."""
        planes = np.asarray(pixels, np.float64)
        planes = planes.transpose(0, 3, 1, 2) if self.is_last else planes
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

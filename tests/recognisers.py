"""Recognisers as users have them: the default one before its adaptation, and tiny ones of every form."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from nereid.base.assets import TEXT_REPOSITORY
from nereid.tasks.read.characters import KEY
from nereid.tasks.read.dictionary import characters_of
from tests.networks import value, written

ADAPTED = TEXT_REPOSITORY / "text_recognise" / "1" / "model.onnx"
CHARACTERS = ("a", "b", "ß", "\u2028", "文")
STEP_PX = 8
SEED = 28


def raw(target: Path, is_softmax: bool = True, characters: Sequence[str] | None = None) -> tuple[str, ...]:
    """Write the default recogniser as its training framework exports it, with probabilities or logits.

    Its metadata have `characters`, None for its own; returns the latter.
    """
    model = onnx.load(ADAPTED)
    original_characters = characters_of(model)
    (top,) = [node for node in model.graph.node if node.op_type == "TopK"]
    name, classes = top.input[0], len(original_characters) + 2
    (last,) = [node for node in model.graph.node if list(node.output) == [name]]
    picked = [node for node in model.graph.node if node.input[0] in top.output]
    dropped = [top, *picked, *(() if is_softmax else (last,))]
    kept = [node for node in model.graph.node if node not in dropped]
    del model.graph.node[:], model.graph.output[:]
    model.graph.node.extend(kept)
    model.graph.output.append(value(name if is_softmax else last.input[0], "FP32", ["N", "T", classes]))
    if characters is not None:
        del model.metadata_props[:]
        write_characters(model, characters)
    onnx.checker.check_model(model)
    onnx.save(model, target)
    return original_characters


def retrained(target: Path) -> Path:
    """Write the recogniser with slightly other weights, as another training gives them."""
    network = onnx.load(ADAPTED)
    random = np.random.default_rng(SEED)
    for tensor in network.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and len(tensor.dims) > 1:
            weights = numpy_helper.to_array(tensor)
            changed = weights * (1 + random.normal(0, 1e-3, weights.shape)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(changed, tensor.name))
    onnx.save(network, target)
    return target


def write_characters(model: onnx.ModelProto, characters: Sequence[str]) -> None:
    if characters:
        model.metadata_props.add(key=KEY, value="\n".join(characters))


@dataclass(frozen=True)
class TestRecogniser:
    """A recogniser that draws its classes, with blank and space, from the mean colour of every 8 columns.

    `output` names the first two axes of [N, T, classes], or of [T, N, classes].
    """

    __test__ = False

    opset: int = 17
    datatype: str = "FP32"
    has_softmax: bool = False
    batch: int | None = None
    shape: tuple[int | str, ...] = (3, 48, "W")
    classes: int = len(CHARACTERS) + 2
    characters: tuple[str, ...] = CHARACTERS
    output: str = ""

    @property
    def weights(self) -> np.ndarray:
        return np.random.default_rng(7).standard_normal((3, self.classes)).astype(np.float32) * 4

    def build(self) -> onnx.ModelProto:
        kind = {"FP16": "float16", "FP64": "double", "FP32": "float"}[self.datatype]
        element = TensorProto.DataType.Value(kind.upper())
        first = self.batch if self.batch is not None else "N"
        shape, order = ",".join(map(str, self.shape)), self.output or f"{first},T"
        model = written(
            f"""(float[{first},{shape}] x) => ({kind}[{order},{self.classes}] classes) {{
                means = AveragePool <kernel_shape = [48, {STEP_PX}], strides = [48, {STEP_PX}]> (x)
                steps = Transpose <perm = [0, 3, 1, 2]> (means)
                colours = Reshape (steps, dims)
                logits = MatMul (colours, weights)
                ordered = Transpose <perm = [{"1, 0, 2" if self.output else "0, 1, 2"}]> (logits)
                values = {"Softmax <axis = 2>" if self.has_softmax else "Identity"} (ordered)
                classes = Cast <to = {element}> (values)
            }}""",
            self.opset,
            weights=self.weights,
            dims=np.array([0, -1, 3]),
        )
        write_characters(model, self.characters)
        return model

    def probabilities(self, lines: np.ndarray) -> np.ndarray:
        """Return the reference, float64[N, T, classes], for lines [N, 3, 48, W]."""
        rows, _, _, width = lines.shape
        means = lines.astype(np.float64).reshape(rows, 3, 48, width // STEP_PX, STEP_PX).mean((2, 4))
        logits = means.transpose(0, 2, 1) @ self.weights.astype(np.float64)
        powers = np.exp(logits - logits.max(2, keepdims=True))
        probabilities: np.ndarray = powers / powers.sum(2, keepdims=True)
        return probabilities

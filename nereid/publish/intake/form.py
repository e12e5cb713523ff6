"""The form of a user's classifier: its input, its scores, and the preprocessing that fits."""

from collections.abc import Mapping
from dataclasses import dataclass

from nereid.errors import WrongUsage
from nereid.imaging.preprocess_settings import PRESETS, REPLACES
from nereid.inference.signature import NetworkTensor, Signature
from nereid.publish.configs import Tensor
from nereid.repository.onnx_file import describe

PIXELS = ("TYPE_FP32", "TYPE_FP16", "TYPE_UINT8")
CHANNELS = 3
# The presets' `resize_shorter_px` is for this side; other sides scale it in proportion.
USUAL_SIDE_PX = 224
NORMALISATION = ("preset", "mean", "std", "scale")


@dataclass(frozen=True, slots=True)
class Form:
    """A classifier's input and scores as tensors of Triton.

    `is_last` is true for the layout NHWC, `is_grey` for a network that had one channel before its changes.
    """

    image: Tensor
    scores: Tensor
    is_last: bool
    is_grey: bool

    @property
    def sides_px(self) -> tuple[int, int]:
        """Height and width of the input."""
        height, width = self.image.dims[:2] if self.is_last else self.image.dims[1:]
        return height, width

    @property
    def classes(self) -> int:
        """The number of classes."""
        return self.scores.dims[0]


def read(original: Signature, signature: Signature, scores: str, size_px: int) -> Form:
    """Read the form of an adapted network.

    Args:
        original: the inputs and outputs in the user's file.
        signature: those after the changes.
        scores: name of the output with the scores.
        size_px: height and width, for a network that accepts any size; 0 if it does not.

    Raises:
        WrongUsage: the network does not take images and return scores.
    """
    image, is_last = _input(signature.inputs, size_px)
    was_grey = any(CHANNELS not in each.shape and 1 in each.shape[1:] for each in original.inputs.values())
    return Form(image, _output(signature.outputs, scores), is_last, was_grey)


def preprocessing(form: Form, given: Mapping[str, str]) -> dict[str, str]:
    """Return all parameters of the preprocessing: the given ones, and those that the form determines.

    Raises:
        WrongUsage: nothing says how the network's pixels are normalised.
    """
    found = {key: _per_channel(key, text) for key, text in given.items()}
    if form.is_grey and found.get("color_order", "RGB") != "RGB":
        raise WrongUsage("color_order: expected RGB for a network with one channel, got BGR")
    if form.image.datatype != "TYPE_UINT8" and not any(found.get(key) for key in NORMALISATION):
        raise WrongUsage(
            "expected the preprocessing that the network was trained with; fix: name a --preset "
            f"({', '.join(PRESETS)}), or its numbers with --preprocess mean=… --preprocess std=…"
        )
    if form.is_last:
        found["layout"] = "NHWC"
    if found.get("resize", "shorter_side") == "shorter_side" and "resize_shorter_px" not in found:
        preset = PRESETS.get(found.get("preset", ""), {})
        if preset.get("resize", "shorter_side") == "shorter_side":
            side = max(form.sides_px)
            usual = int(preset.get("resize_shorter_px", USUAL_SIDE_PX))
            if not preset or side != USUAL_SIDE_PX:
                found["resize_shorter_px"] = str(round(usual * side / USUAL_SIDE_PX))
    return found


def known_parameters(form: Form, known: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a file's metadata that fit the form and the given parameters.

    A given normalisation or preset replaces them all.
    """
    if any(key in given for key in NORMALISATION):
        return {}
    without = {other for key in given for other in REPLACES.get(key, ())}
    if form.image.datatype == "TYPE_UINT8":
        without |= {*NORMALISATION}
    return {key: text for key, text in known.items() if key not in without}


def _per_channel(key: str, text: str) -> str:
    """Repeat a single number for every channel."""
    return ", ".join([text] * CHANNELS) if key in ("mean", "std") and "," not in text else text


def _input(inputs: Mapping[str, NetworkTensor], size_px: int) -> tuple[Tensor, bool]:
    if len(inputs) != 1:
        raise WrongUsage(f"expected a network with one input, for images, got: {', '.join(inputs) or 'none'}")
    ((name, tensor),) = inputs.items()
    is_last = tensor.shape[-1:] == (CHANNELS,) and tensor.shape[1:2] != (CHANNELS,)
    sides = tensor.shape[1:3] if is_last else tensor.shape[2:4]
    channels = tensor.shape[3:4] if is_last else tensor.shape[1:2]
    if len(tensor.shape) != 4 or channels not in ((CHANNELS,), (-1,)) or tensor.datatype not in PIXELS:
        raise WrongUsage(
            f"input '{name}': expected FP32, FP16 or UINT8 images, [N,3,height,width] or [N,height,width,3] "
            f"or with one channel, got {describe(tensor)}"
        )
    if not tensor.can_batch:
        raise WrongUsage(f"input '{name}': expected images as rows of a batch, got {describe(tensor)}")
    height, width = (size_px if side == -1 else side for side in sides)
    if not height or not width:
        raise WrongUsage(
            f"input '{name}' has no fixed size, {describe(tensor)}; fix: set height and width with --size"
        )
    if size_px and (height, width) != (size_px, size_px):
        raise WrongUsage(f"input '{name}': expected {height} x {width} pixels, got --size {size_px}")
    dims = (height, width, CHANNELS) if is_last else (CHANNELS, height, width)
    return Tensor(name, tensor.datatype, dims), is_last


def _output(outputs: Mapping[str, NetworkTensor], name: str) -> Tensor:
    tensor = outputs[name]
    if len(tensor.shape) != 2 or tensor.shape[1] < 1 or tensor.datatype != "TYPE_FP32":
        raise WrongUsage(
            f"output '{name}': expected scores as FP32 [N,classes], got {describe(tensor)}; "
            "fix: name another output with --output, or export the network with a fixed number of classes"
        )
    return Tensor(name, tensor.datatype, tensor.shape[1:])

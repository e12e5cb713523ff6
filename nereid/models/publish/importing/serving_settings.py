"""How a user's network is served, as decided from its file: input, outputs, preprocessing and processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nereid.base.config.model_config import ServedTensor
from nereid.base.errors import WrongUsage
from nereid.models.publish.importing.network_facts import NetworkFacts, Size
from nereid.repository.onnx_file import describe
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.inference.signature import NetworkTensor, Signature

PIXELS = ("TYPE_FP32", "TYPE_FP16", "TYPE_UINT8")
CHANNELS = 3
# Larger images are not decoded, either.
MAX_SIDE_PX = ImageLimits().max_image_side_px
# Python, NumPy and ONNX Runtime in a process without a network. Source: docs/architecture.md.
PROCESS_BYTES = 45 * 2**20


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What the models of an addition share.

    Args:
        image: the input of the network.
        outputs: the served outputs, by role; a classifier's first output holds its scores.
        is_channels_last: whether the layout is NHWC.
        is_grey: whether the network had one channel before its changes.
        classes: the number of classes; 0 if the shapes do not show it.
        head: the layout of a detector's outputs; empty for other networks.
        left_to_do: preprocessing in front of a network that resizes or normalises its images itself.
        parameters: all parameters of the preprocessing.
        has_labels: whether there are class names.
        can_batch: whether the network computes several rows at a time.
        instances: processes of the pinned model on a CPU; None for as many as fit the machine.
        companions: default models that the pinned model also uses, and their versions.
    """

    image: ServedTensor
    outputs: tuple[ServedTensor, ...]
    is_channels_last: bool = False
    is_grey: bool = False
    classes: int = 0
    head: str = ""
    left_to_do: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    has_labels: bool = False
    can_batch: bool = True
    instances: int | None = None
    companions: Mapping[str, int] = field(default_factory=dict)

    @property
    def sides_px(self) -> tuple[int, int]:
        """Height and width of the input; -1 for any width."""
        height, width = self.image.dims[:2] if self.is_channels_last else self.image.dims[1:]
        return height, width


def is_grey(original: Signature) -> bool:
    """Return whether the network in the user's file takes single-channel images."""
    return any(CHANNELS not in tensor.shape and 1 in tensor.shape[1:] for tensor in original.inputs.values())


def read_input(inputs: Mapping[str, NetworkTensor], size: Size) -> tuple[ServedTensor, bool]:
    """Return the input, and whether its layout is NHWC; WrongUsage if it is not an image of that size."""
    if len(inputs) != 1:
        raise WrongUsage(f"expected a network with one input, for images, got: {', '.join(inputs) or 'none'}")
    ((name, tensor),) = inputs.items()
    is_channels_last = tensor.shape[-1:] == (CHANNELS,) and tensor.shape[1:2] != (CHANNELS,)
    sides = tensor.shape[1:3] if is_channels_last else tensor.shape[2:4]
    channels = tensor.shape[3:4] if is_channels_last else tensor.shape[1:2]
    if len(tensor.shape) != 4 or channels not in ((CHANNELS,), (-1,)) or tensor.datatype not in PIXELS:
        raise WrongUsage(
            f"input '{name}': expected FP32, FP16 or UINT8 images, [N,3,height,width] or [N,height,width,3] "
            f"or with one channel, got {describe(tensor)}"
        )
    if not tensor.can_batch:
        raise WrongUsage(f"input '{name}': expected images as rows of a batch, got {describe(tensor)}")
    height, width = (requested if side == -1 else side for side, requested in zip(sides, size, strict=True))
    if not height or not width:
        raise WrongUsage(
            f"input '{name}' has no fixed size, {describe(tensor)}; fix: set height and width with --size"
        )
    if any(size) and (height, width) != size:
        raise WrongUsage(f"input '{name}': expected {height} x {width} pixels, got {size[0]} x {size[1]}")
    if max(height, width) > MAX_SIDE_PX:
        raise WrongUsage(
            f"input '{name}': expected at most {MAX_SIDE_PX:,} pixels a side, got {describe(tensor)}"
        )
    dims = (height, width, CHANNELS) if is_channels_last else (CHANNELS, height, width)
    return ServedTensor(name, tensor.datatype, dims), is_channels_last


def read_rows(
    facts: NetworkFacts,
    signature: Signature,
    output: str,
    size: Size,
    axis_names: tuple[str, str],
    min_columns: int,
    fix: str = "",
) -> ServingSettings:
    """Read the input, and an output with at least `min_columns` numbers for each image.

    `axis_names` name its rows and its columns, and `fix` is another remedy. WrongUsage: it has another form.
    """
    tensor, (rows, columns) = signature.outputs[output], axis_names
    if len(tensor.shape) != 2 or tensor.shape[1] < min_columns or tensor.datatype != "TYPE_FP32":
        raise WrongUsage(
            f"output '{output}': expected {rows} as FP32 [N,{columns}], got {describe(tensor)}; fix: name "
            f"another output with --output, or export the network with a fixed number of {columns}{fix}"
        )
    image, is_channels_last = read_input(signature.inputs, size)
    served = ServedTensor(output, tensor.datatype, tensor.shape[1:])
    return ServingSettings(image, (served,), is_channels_last, is_grey(facts.signature))

"""How a user's network is served, as decided from its file: input, outputs, preprocessing and processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from nereid.base.assets import SAMPLES
from nereid.base.errors import WrongUsage
from nereid.base.units import escaped
from nereid.models.publish.importing.adaptation import NetworkChoices
from nereid.models.publish.importing.network_facts import ANY_SIZE, ExporterSettings, NetworkFacts, Size
from nereid.models.publish.staged_version import Description
from nereid.repository.onnx_file import describe
from nereid.vision.imaging.decode import ImageLimits
from nereid.vision.imaging.preprocess_settings import PARAMETERS, PRESETS, REPLACES
from nereid.vision.inference.signature import NetworkTensor, Signature

PIXELS = ("TYPE_FP32", "TYPE_FP16", "TYPE_UINT8")
CHANNELS = 3
# The presets' `resize_shorter_px` assumes this side, and is scaled in proportion for others.
USUAL_SIDE_PX = 224
# Larger images are not decoded, either.
MAX_SIDE_PX = ImageLimits().max_image_side_px
NORMALISATION = ("preset", "mean", "std", "scale")
# Python, NumPy and ONNX Runtime in a process without a network. Source: docs/architecture.md.
PROCESS_BYTES = 45 * 2**20


class ServedTensor(NamedTuple):
    """A tensor of the network: name, Triton's datatype, dims without the batch."""

    name: str
    datatype: str
    dims: tuple[int, ...]


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


@dataclass(slots=True)
class ImageInput:
    """Whole images, as a preprocess model converts them; an `InputKind`.

    Args:
        usual_size: returns height and width for a network that accepts any and notes none; zeros for none.
    """

    usual_size: Callable[[Signature], Size] = lambda signature: ANY_SIZE
    unit: str = "image"
    labels_are: str = "names"
    samples: tuple[Path, ...] = SAMPLES
    is_reader: bool = False

    def labels(self, facts: NetworkFacts) -> tuple[tuple[str, ...], str]:
        """Return the class names in the file, and their origin."""
        return facts.labels, facts.labels_from

    def check_labels(self, labels: Sequence[str], origin: str) -> None:
        """Raise WrongUsage for names with characters that affect a terminal, or end a string."""
        for number, name in enumerate(labels, start=1):
            if (shown := escaped(name)) != name or "\t" in name:
                raise WrongUsage(
                    f"label {number} of {origin}: expected no control characters, got '{shown[:64]}'; "
                    "fix: --labels FILE with plain names"
                )

    def with_notes(self, choices: NetworkChoices, facts: NetworkFacts) -> NetworkChoices:
        """Return the choices with the noted head, and with a size for a network that accepts any."""
        size, inputs = choices.size, facts.signature.inputs.values()
        if not any(size) and any(-1 in tensor.shape[1:] for tensor in inputs):
            size = (
                facts.exporter_settings.size
                if any(facts.exporter_settings.size)
                else self.usual_size(facts.signature)
            )
        return replace(choices, size=size, head=choices.head or facts.exporter_settings.head)

    def preprocessing(
        self, settings: ServingSettings, exporter_settings: ExporterSettings, parameters: Mapping[str, str]
    ) -> tuple[dict[str, str], str]:
        """Return all parameters of the preprocessing, and the origin of those that were not given.

        They combine the noted and the given parameters with those that input and head determine. A given
        normalisation or preset replaces everything the exporter noted.

        Raises:
            WrongUsage: a parameter is unknown, or nothing says how the network's pixels are normalised.
        """
        if unknown := sorted(parameters.keys() - PARAMETERS):
            raise WrongUsage(
                f"unknown parameter of a preprocessing: expected one of {', '.join(sorted(PARAMETERS))}, "
                f"got '{unknown[0]}'"
            )
        noted = _noted_parameters(settings, exporter_settings.parameters or settings.left_to_do, parameters)
        if settings.left_to_do and parameters.keys().isdisjoint(("preset", "resize", "resize_shorter_px")):
            # Also with a given normalisation.
            noted = {"resize": settings.left_to_do["resize"], **noted}
        combined = {key: _per_channel(key, text) for key, text in {**noted, **parameters}.items()}
        if settings.is_grey and combined.get("color_order", "RGB") != "RGB":
            raise WrongUsage("color_order: expected RGB for a network with one channel, got BGR")
        is_normalised = any(combined.get(key) for key in NORMALISATION)
        if settings.image.datatype != "TYPE_UINT8" and not is_normalised:
            problem = exporter_settings.problem
            reason = f"{problem}, which cannot be reproduced; " if problem else ""
            raise WrongUsage(
                f"{reason}expected the preprocessing that the network was trained with; fix: name a --preset "
                f"({', '.join(PRESETS)}), or its numbers with --preprocess mean=… --preprocess std=…"
            )
        if settings.is_channels_last:
            combined["layout"] = "NHWC"
        return combined | _shorter_side(combined, settings), exporter_settings.origin if noted else ""

    def copy_companions(self, public: str, repository: Path, target: Path) -> dict[str, int]:
        """Return nothing, because the pinned model uses only preprocessing and network."""
        return {}

    def repeat_choices(
        self, path: Path, current: Path, past: Description, image: Mapping[str, Any]
    ) -> NetworkChoices:
        """Return the choices of the current version, with the size of its input."""
        first, *_, last = dims = [int(dim) for dim in image["dims"]]
        is_channels_last = last == CHANNELS and first != CHANNELS
        height, width = dims[:2] if is_channels_last else dims[-2:]
        return NetworkChoices((height, width), past.output, past.activation, past.head)

    def instance_bytes(self, network_bytes: int) -> int:
        """Return the memory of the network plus a process without one."""
        return network_bytes + PROCESS_BYTES


def _noted_parameters(
    settings: ServingSettings, noted: Mapping[str, str], parameters: Mapping[str, str]
) -> dict[str, str]:
    """Return the parameters of a file's metadata that fit the input and the given parameters."""
    if any(key in parameters for key in NORMALISATION):
        return {}
    without = {other for key in parameters for other in REPLACES.get(key, ())}
    if settings.image.datatype == "TYPE_UINT8":
        without |= {*NORMALISATION}
    return {key: text for key, text in noted.items() if key not in without}


def _per_channel(key: str, text: str) -> str:
    return ", ".join([text] * CHANNELS) if key in ("mean", "std") and "," not in text else text


def _shorter_side(parameters: Mapping[str, str], settings: ServingSettings) -> dict[str, str]:
    """Return the side to which images are resized before the crop, if the parameters leave it open."""
    preset = PRESETS.get(parameters.get("preset", ""), {})
    resizes = {source.get("resize", "shorter_side") for source in (parameters, preset)}
    side = max(settings.sides_px)
    is_usual = bool(preset) and side == USUAL_SIDE_PX
    if "resize_shorter_px" in parameters or resizes != {"shorter_side"} or is_usual:
        return {}
    usual = int(preset.get("resize_shorter_px", USUAL_SIDE_PX))
    return {"resize_shorter_px": str(round(usual * side / USUAL_SIDE_PX))}

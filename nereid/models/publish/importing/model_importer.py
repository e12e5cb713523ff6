"""What a task offers to `nereid add` and `nereid publish`, and the choice of a task for a file."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from nereid.base.assets import SAMPLES
from nereid.base.errors import WrongUsage
from nereid.base.task_registry import DEFAULT_TASK, TASKS
from nereid.base.units import escaped
from nereid.models.publish.configs import Addition, ModelNames
from nereid.models.publish.examination import FirstRun
from nereid.models.publish.importing.adaptation import Adapted, Names, NetworkChoices
from nereid.models.publish.importing.graph_edits import Activation
from nereid.models.publish.importing.network_facts import ANY_SIZE, ExporterSettings, NetworkFacts, Size
from nereid.models.publish.importing.serving_settings import CHANNELS, ServingSettings
from nereid.models.publish.staged_version import Description
from nereid.vision.imaging.preprocess_settings import PARAMETERS, PRESETS, REPLACES
from nereid.vision.inference.signature import Signature

# Results of Ultralytics' other tasks. Read as boxes, they would be silently wrong.
UNSERVED = {"segment": "masks", "pose": "key points", "obb": "turned boxes"}
# Source: super-gradients, training/utils/export_utils.py.
FLAT = "flat_predictions"
# The presets' `resize_shorter_px` assumes this side, and is scaled in proportion for others.
USUAL_SIDE_PX = 224
NORMALISATION = ("preset", "mean", "std", "scale")
# For each row, a word and a text.
ScreenRows = list[tuple[str, str]]


class ModelImporter(ABC):
    """How a network of a task is recognised, changed, served and shown: the entry point `importer`.

    The defaults are those of a network for whole images.

    Attributes:
        name: name of the task.
        rank: tasks with a lower number are tried first for a file.
        results: field of `nereid add --json` with what was found in each image.
        has_one_form: whether a network is changed in one way only, so that a current version without a
            description is enough to change the next one.
        leaves_out_by_score: whether the first run must be repeated after an activation was appended.
        unit: a row of the network's input, in words.
        labels_are: what the lines of a label file are; empty for none.
        samples: images that are shown if the user gives none.
        process_bytes: memory of a process of the pinned model on a CPU; 0 if it depends on the network.
    """

    name: str
    rank: int
    results: str
    has_one_form = leaves_out_by_score = False
    unit, labels_are, process_bytes = "image", "names", 0
    samples: tuple[Path, ...] = SAMPLES

    @staticmethod
    def exporter_settings(metadata: Mapping[str, str]) -> ExporterSettings | None:
        """Return what Ultralytics noted in a file of this task; None for other files."""
        return None

    @abstractmethod
    def recognises(self, facts: NetworkFacts, size: Size) -> bool:
        """Return whether a file is of this task; `size` is height and width in pixels, zeros if unknown."""

    def usual_size(self, signature: Signature) -> Size:
        """Return height and width for a network that accepts any and notes none; zeros for none."""
        return ANY_SIZE

    def labels(self, facts: NetworkFacts) -> tuple[tuple[str, ...], str]:
        """Return the labels in the file or next to it, and their origin for messages."""
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
        if exporter_settings.parameters and "resize_shorter_px" in noted.keys() - parameters.keys():
            _check_crop(settings, exporter_settings)
        if settings.is_channels_last:
            combined["layout"] = "NHWC"
        return combined | _shorter_side(combined, settings), exporter_settings.origin if noted else ""

    def copy_companions(self, public: str, repository: Path, target: Path) -> dict[str, int]:
        """Copy the default models that the pinned model also uses to `target`; return their versions.

        WrongUsage: `public`, the added name, is one of theirs, or `repository` has others by those names.
        """
        return {}

    def repeat_choices(
        self, path: Path, current: Path, past: Description, image: Mapping[str, Any]
    ) -> NetworkChoices:
        """Return the choices for the next version, whose file is `path`.

        `current` is the file of the current version, `past` its description, `image` the input in its config.
        """
        first, *_, last = dims = [int(dim) for dim in image["dims"]]
        is_channels_last = last == CHANNELS and first != CHANNELS
        height, width = dims[:2] if is_channels_last else dims[-2:]
        return NetworkChoices((height, width), past.output, past.activation, past.head)

    @abstractmethod
    def adapt(
        self, path: Path, choices: NetworkChoices, activation: Activation = "none", names: Names = None
    ) -> Adapted:
        """Change a file into the form that is served, with `activation` appended to the scores.

        `names` are the input's and outputs' names in config order; None for those in the file.
        WrongUsage: the network is not of this task, or a choice does not fit.
        """

    @abstractmethod
    def settings(
        self, facts: NetworkFacts, signature: Signature, outputs: Sequence[str], choices: NetworkChoices
    ) -> ServingSettings:
        """Read input and outputs of a changed file, whose `outputs` by role `adapt` returned.

        `facts` describe the file before its changes. WrongUsage: the network cannot be served.
        """

    @abstractmethod
    def models(self, names: ModelNames, settings: ServingSettings, choices: NetworkChoices) -> Addition:
        """Return the models to add."""

    def activation(self, choices: NetworkChoices, first_run: FirstRun) -> Activation:
        """Return the function to append after a first run; WrongUsage if the choice does not fit it."""
        return "none"

    def rows(self, settings: ServingSettings, first_run: FirstRun, activation: Activation) -> ScreenRows:
        """Return what the network returns with this activation, beside the labels."""
        return []

    @abstractmethod
    def shown(self, results: Sequence[Any]) -> str:
        """Return what was found in one image, a row of `FirstRun.results`, for the screen."""


@cache
def importers() -> Mapping[str, ModelImporter]:
    """Return the importers of all tasks by name, in the order in which they are tried."""
    entry_points = [task.entry_point("importer") for task in TASKS if not task.extends]
    return {
        entry_point.name: entry_point()
        for entry_point in sorted(filter(None, entry_points), key=lambda entry_point: entry_point.rank)
    }


def named_importer(name: str) -> ModelImporter:
    """Return the importer of a task; WrongUsage if there is none."""
    if name not in importers():
        raise WrongUsage(f"invalid task: expected one of {', '.join(sorted(importers()))}, got '{name}'")
    return importers()[name]


def choose_importer(name: str, facts: NetworkFacts, size: Size) -> ModelImporter:
    """Return the importer of a task; without a name, of the first task that recognises the file.

    Raises:
        WrongUsage: no task has that name, or metadata or outputs belong to another kind of network.
    """
    known = ", ".join(sorted(importers()))
    if facts.task in UNSERVED.keys() - importers().keys():
        raise WrongUsage(
            f"the file's metadata names the task '{facts.task}': its {UNSERVED[facts.task]} cannot be "
            f"served; fix: a network for one of {known}"
        )
    if flat := [output for output in facts.signature.outputs if output.endswith(FLAT)]:
        raise WrongUsage(
            f"output '{flat[0]}': expected rows of each image, got one list for all images (YOLO-NAS's flat "
            "format); fix: export it with output_predictions_format=DetectionOutputFormatMode.BATCH_FORMAT"
        )
    if name:
        return named_importer(name)
    if facts.task and facts.task not in importers():
        raise WrongUsage(
            f"the file's metadata names the task '{facts.task}': expected one of {known}; "
            "fix: --task, if its outputs are those of that task"
        )
    recognising = (importer for importer in importers().values() if importer.recognises(facts, size))
    return next(recognising, importers()[DEFAULT_TASK.name])


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


def _check_crop(settings: ServingSettings, noted: ExporterSettings) -> None:
    """Raise WrongUsage if the noted crop is for another size than the network's."""
    if settings.sides_px == noted.size or not any(noted.size):
        return
    (height, width), (noted_height, noted_width) = settings.sides_px, noted.size
    scaled = int(noted.parameters["resize_shorter_px"]) * max(height, width) / max(noted.size)
    raise WrongUsage(
        f"{noted.origin}: expected the preprocessing for {height} x {width} pixels, got {noted_height} x "
        f"{noted_width}; fix: use this network's, or add --preprocess resize_shorter_px={scaled:.0f}"
    )


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

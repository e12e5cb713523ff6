"""What a task offers to `nereid add` and `nereid publish`, and the choice of a task for a file."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from nereid.base.errors import WrongUsage
from nereid.base.task_registry import DEFAULT_TASK, TASKS
from nereid.models.publish.configs import ModelNames
from nereid.models.publish.examination import FirstRun
from nereid.models.publish.importing.adaptation import Adapted, Names, NetworkChoices
from nereid.models.publish.importing.graph_edits import Activation
from nereid.models.publish.importing.network_facts import ExporterSettings, NetworkFacts, Size
from nereid.models.publish.importing.serving_settings import ServingSettings
from nereid.models.publish.staged_version import Description
from nereid.vision.inference.signature import Signature

# Results of Ultralytics' other tasks. Read as boxes, they would be silently wrong.
UNSERVED = {"segment": "masks", "pose": "key points", "obb": "turned boxes"}
# Source: super-gradients, training/utils/export_utils.py.
FLAT = "flat_predictions"


class InputKind(Protocol):
    """What a row of an input is: `nereid.models.publish.importing.serving_settings.ImageInput` is one.

    Attributes:
        unit: a row in words, such as `image`.
        labels_are: what the lines of a label file are, such as `names`; empty for none.
        samples: images that are shown if the user gives none.
        is_reader: whether an instance needs the memory of a reader (`nereid.repository.instance_sizing`).
    """

    unit: str
    labels_are: str
    samples: tuple[Path, ...]
    is_reader: bool

    def labels(self, facts: NetworkFacts) -> tuple[tuple[str, ...], str]:
        """Return the labels in the file or next to it, and their origin for messages."""

    def check_labels(self, labels: Sequence[str], origin: str) -> None:
        """Raise WrongUsage for labels that cannot be shown."""

    def with_notes(self, choices: NetworkChoices, facts: NetworkFacts) -> NetworkChoices:
        """Return the user's choices, completed from the exporter's notes."""

    def preprocessing(
        self, settings: ServingSettings, exporter_settings: ExporterSettings, parameters: Mapping[str, str]
    ) -> tuple[dict[str, str], str]:
        """Return all parameters of the preprocessing, and the origin of those that were not given."""

    def copy_companions(self, public: str, repository: Path, target: Path) -> dict[str, int]:
        """Copy the default models that the pinned model also uses to `target`; return their versions.

        WrongUsage: `public`, the added name, is one of theirs, or `repository` has others by those names.
        """

    def repeat_choices(
        self, path: Path, current: Path, past: Description, image: Mapping[str, Any]
    ) -> NetworkChoices:
        """Return the choices for the next version, whose file is `path`.

        `current` is the file of the current version, `past` its description, `image` the input in its config.
        """

    def instance_bytes(self, network_bytes: int) -> int:
        """Return the memory of one process of the pinned model on a CPU."""


class AddedModels(Protocol):
    """The models of an addition: `nereid.models.publish.configs.Addition`, or others of the task."""

    @property
    def labelled(self) -> set[str]:
        """The models with a label file."""

    @property
    def deadline_ms(self) -> int:
        """The route's deadline for a request."""

    def configs(self) -> dict[str, dict[str, str]]:
        """Return the configs of all models by profile, in load order; the route is last."""


class ModelImporter(Protocol):
    """How a network of a task is recognised, changed, served and shown: the entry point `importer`.

    Attributes:
        name: name of the task.
        rank: tasks with a lower number are tried first for a file.
        input: what a row of the network's input is.
        results: field of `nereid add --json` with what was found in each image.
        has_one_form: whether a network is changed in one way only, so that a current version without a
            description is enough to change the next one.
        leaves_out_by_score: whether the first run must be repeated after an activation was appended.
    """

    name: str
    rank: int
    input: InputKind
    results: str
    has_one_form: bool
    leaves_out_by_score: bool

    @staticmethod
    def exporter_settings(metadata: Mapping[str, str]) -> ExporterSettings | None:
        """Return what Ultralytics noted in a file of this task; None for other files."""

    def recognises(self, facts: NetworkFacts, size: Size) -> bool:
        """Return whether a file is of this task; `size` is height and width in pixels, zeros if unknown."""

    def adapt(
        self, path: Path, choices: NetworkChoices, activation: Activation = "none", names: Names = None
    ) -> Adapted:
        """Change a file into the form that is served, with `activation` appended to the scores.

        `names` are the input's and outputs' names in config order; None for those in the file.
        WrongUsage: the network is not of this task, or a choice does not fit.
        """

    def settings(
        self, facts: NetworkFacts, signature: Signature, outputs: Sequence[str], choices: NetworkChoices
    ) -> ServingSettings:
        """Read input and outputs of a changed file, whose `outputs` by role `adapt` returned.

        `facts` describe the file before its changes. WrongUsage: the network cannot be served.
        """

    def models(self, names: ModelNames, settings: ServingSettings, choices: NetworkChoices) -> AddedModels:
        """Return the models to add."""

    def activation(self, choices: NetworkChoices, first_run: FirstRun) -> Activation:
        """Return the function to append after a first run; WrongUsage if the choice does not fit it."""

    def rows(
        self, settings: ServingSettings, first_run: FirstRun, activation: Activation
    ) -> list[tuple[str, str]]:
        """Return rows for the screen: a word, and what the network returns with this activation."""

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

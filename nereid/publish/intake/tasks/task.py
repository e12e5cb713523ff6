"""The interface of a task: how the file of its networks is read, changed, served and shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from nereid.inference.signature import Signature
from nereid.publish.configs import Models, Names, Properties
from nereid.publish.examination.examine import Survey
from nereid.publish.intake.adaptation import Activation, ActivationRule
from nereid.publish.intake.description import Description
from nereid.publish.intake.dictionary import LABELS
from nereid.publish.intake.exporters import ANY_SIZE, Noted, Size
from nereid.publish.intake.form import Form, Preprocessing
from nereid.publish.intake.metadata import Metadata


@dataclass(frozen=True, slots=True)
class Choices:
    """Choices of the user about a network, which its file does not contain.

    Args:
        size: height and width of the input in pixels, for a network that accepts any size; zeros for that of
            the file.
        output: the output with the scores; empty for the only one.
        activation: function to append to the scores; `auto` decides after a run.
        head: layout of a detector's outputs; empty to find it from names and shapes.
        last_step: parameters of the model after the network, such as thresholds.
        labels: class names, or the characters of a recogniser; () for those in the file.
        labels_from: the origin of the labels, for messages.
    """

    size: Size = ANY_SIZE
    output: str = ""
    activation: ActivationRule = "auto"
    head: str = ""
    last_step: Mapping[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    labels_from: str = LABELS


class Adapted(NamedTuple):
    """A changed file: the names of its outputs by role, and a sentence for each change and note."""

    outputs: tuple[str, ...]
    changes: list[str]
    notes: Sequence[str] = ()


class TaskInput(Protocol):
    """The input of a task's networks: whole images, or lines of text."""

    @property
    def unit(self) -> str:
        """One row of the network's batch, in words."""

    @property
    def samples(self) -> tuple[Path, ...]:
        """Images for an examination, if the user names none."""

    @property
    def companions(self) -> tuple[str, ...]:
        """Models of the package that the pinned model uses, too."""

    def labels(self, meta: Metadata) -> tuple[tuple[str, ...], str]:
        """Return the class names or characters in the file, and their origin."""

    def with_notes(self, choices: Choices, signature: Signature, noted: Noted) -> Choices:
        """Return the choices, completed by what the exporter noted."""

    def preprocessing(self, form: Form, noted: Noted, given: Mapping[str, str]) -> Preprocessing:
        """Return the parameters of the preprocessing.

        Args:
            form: of the network.
            noted: what the exporter noted.
            given: those of the user.

        Raises:
            WrongUsage: they are not complete, or the task does not have them.
        """

    def repeated(self, path: Path, current: Path, past: Description, image: Mapping[str, Any]) -> Choices:
        """Return the choices for the next version.

        Args:
            path: the file of the next version.
            current: the file of the current one.
            past: its description.
            image: the input in the network's config.
        """

    def process_bytes(self, network_bytes: int) -> int:
        """Return the memory of one process of the pinned model on a CPU."""


class Task(Protocol):
    """A task: what its networks take and return, and the models that serve them."""

    @property
    def name(self) -> str:
        """The word for `--task`."""

    @property
    def input(self) -> TaskInput:
        """The input of its networks."""

    def recognises(self, signature: Signature, meta: Metadata, size: Size) -> bool:
        """Return whether a file is certainly of this task."""

    def adapt(
        self,
        path: Path,
        choices: Choices,
        activation: Activation = "none",
        names: Sequence[str] | None = None,
    ) -> Adapted:
        """Change a file so that the runtimes open it, and it takes batches of images.

        Args:
            path: the file.
            choices: those of the user.
            activation: function to append to the scores.
            names: of the input and of the outputs by role; None for those in the file.

        Raises:
            WrongUsage: the choices do not fit the file.
        """

    def read_form(
        self, original: Signature, signature: Signature, outputs: Sequence[str], choices: Choices, labels: int
    ) -> Form:
        """Read the form of an adapted network.

        Args:
            original: the inputs and outputs in the user's file.
            signature: those after the changes.
            outputs: names by role.
            choices: those of the user.
            labels: the number of class names; 0 if there are none.

        Raises:
            WrongUsage: the network does not fit the task.
        """

    def models(self, names: Names, form: Form, choices: Choices, properties: Properties) -> Models:
        """Return the models that serve the network."""

    def activation(self, choices: Choices, seen: Survey) -> Activation:
        """Return the activation to append to outputs that were seen in a first run.

        Raises:
            WrongUsage: the choices do not fit the outputs.
        """

    def rows(self, form: Form, seen: Survey) -> list[tuple[str, str]]:
        """Return rows for the screen: a word, and what the network returns."""

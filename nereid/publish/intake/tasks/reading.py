"""Reading: a recogniser of lines of text, behind a model of the backend `text_reader`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nereid.assets import PARCEL_LABEL
from nereid.errors import WrongUsage
from nereid.inference.signature import Signature
from nereid.publish.configs import Names
from nereid.publish.examination.examine import Survey
from nereid.publish.intake import dictionary, recogniser
from nereid.publish.intake.adaptation import Activation, Adapted, Choices
from nereid.publish.intake.description import Description
from nereid.publish.intake.exporters import Noted, Size
from nereid.publish.intake.network_facts import NetworkFacts
from nereid.publish.intake.serving_settings import ServingSettings, Tensor
from nereid.publish.intake.tasks.reader_models import DETECT, DIRECTION, ReaderModels
from nereid.repository import onnx_file
from nereid.repository.fitting import READER_BYTES
from nereid.text.reading_settings import TENSORS

# Datatypes and ranks of a recogniser that returns only the best characters.
BEST = [("TYPE_FP32", 2), ("TYPE_INT64", 2)]


class Lines:
    """Lines of text, as the reader cuts them out of an image."""

    unit = "line"
    samples: tuple[Path, ...] = (PARCEL_LABEL,)
    companions: tuple[str, ...] = (DETECT, DIRECTION)

    def labels(self, facts: NetworkFacts) -> tuple[tuple[str, ...], str]:
        """Return the characters."""
        return facts.characters, dictionary.FILE

    def with_notes(self, choices: Choices, facts: NetworkFacts) -> Choices:
        """Return the choices: the reader cuts its lines in one height."""
        return choices

    def preprocessing(
        self, settings: ServingSettings, noted: Noted, given: Mapping[str, str]
    ) -> tuple[dict[str, str], str]:
        """Return nothing: the reader prepares the lines.

        Raises:
            WrongUsage: there are parameters.
        """
        if given:
            raise WrongUsage(
                f"a recogniser has no parameters of a preprocessing, got {', '.join(given)}; "
                "fix: leave out --preset and --preprocess"
            )
        return {}, ""

    def repeated(self, path: Path, current: Path, past: Description, image: Mapping[str, Any]) -> Choices:
        """Return the choices of the current version, and its characters for a file without its own."""
        own = dictionary.characters_of(onnx_file.read(path).model)
        labels = () if own else dictionary.characters_of(onnx_file.read(current).model)
        return Choices(
            output=past.output, activation=past.activation, labels=labels, labels_from=dictionary.CURRENT
        )

    def process_bytes(self, network_bytes: int) -> int:
        """Return the memory of a process that reads."""
        return READER_BYTES


class Reading:
    """Networks that return characters of lines, [N, T, C], or the best ones already."""

    name = "read"
    input = Lines()

    def recognises(self, facts: NetworkFacts, size: Size) -> bool:
        """Return whether the metadata names the task, or has characters for outputs of a recogniser."""
        kinds = sorted((each.datatype, len(each.shape)) for each in facts.signature.outputs.values())
        has_steps = kinds == BEST or any(rank == 3 for _, rank in kinds)
        return facts.task == self.name or (bool(facts.characters) and has_steps)

    def adapt(
        self,
        path: Path,
        choices: Choices,
        activation: Activation = "none",
        names: Sequence[str] | None = None,
    ) -> Adapted:
        """Change a file to lines [N, 3, 48, W] in, index and probability of the best characters out."""
        if any(choices.size) or choices.head or choices.last_step:
            raise WrongUsage(
                "a recogniser has no size, head or thresholds; fix: leave out --size, --head, "
                "--score-threshold and --iou-threshold"
            )
        return recogniser.adapt_file(path, choices, activation, names)

    def settings(
        self, facts: NetworkFacts, signature: Signature, outputs: Sequence[str], choices: Choices, labels: int
    ) -> ServingSettings:
        """Read the names of the tensors; their kinds are those that the reader needs."""
        (image,) = signature.inputs
        line, best = TENSORS["network"]
        tensors = (Tensor(name, each.datatype, each.dims) for name, each in zip(outputs, best, strict=True))
        return ServingSettings(Tensor(image, line.datatype, line.dims), tuple(tensors))

    def models(self, names: Names, settings: ServingSettings, choices: Choices) -> ReaderModels:
        """Return the models of a reader."""
        return ReaderModels(names, settings)

    def activation(self, choices: Choices, seen: Survey) -> Activation:
        """Return the one that turns the values of the characters into probabilities.

        Raises:
            WrongUsage: the network does not read several lines at a time.
        """
        if not seen.can_batch:
            raise WrongUsage(
                "expected a network that reads several lines at a time, got an error or other text for two "
                "lines in a batch; fix: export it with a variable batch, in which no line changes another one"
            )
        return seen.activation if choices.activation == "auto" else choices.activation

    def rows(self, settings: ServingSettings, seen: Survey) -> list[tuple[str, str]]:
        """Return nothing: the characters are shown as labels."""
        return []

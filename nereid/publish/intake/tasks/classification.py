"""Classification: one output with a score for each class."""

from collections.abc import Sequence
from pathlib import Path

from nereid.errors import WrongUsage
from nereid.inference.signature import Signature
from nereid.publish.configs import Addition, Names, Properties
from nereid.publish.examination.examine import Survey
from nereid.publish.examination.score_outputs import NUMBER
from nereid.publish.intake import adaptation, form
from nereid.publish.intake.adaptation import Activation
from nereid.publish.intake.exporters import Size
from nereid.publish.intake.form import Form
from nereid.publish.intake.metadata import Metadata
from nereid.publish.intake.tasks.image_input import Images
from nereid.publish.intake.tasks.task import Adapted, Choices


class Classification:
    """Networks that return FP32 [N, classes]; it is the task of every file that no other task recognises."""

    name = "classify"
    input = Images()

    def recognises(self, signature: Signature, meta: Metadata, size: Size) -> bool:
        """Return whether the metadata names the task, or the only output has two dims."""
        shapes = [each.shape for each in signature.outputs.values()]
        return meta.task == self.name or (len(shapes) == 1 and len(shapes[0]) == 2)

    def adapt(
        self,
        path: Path,
        choices: Choices,
        activation: Activation = "none",
        names: Sequence[str] | None = None,
    ) -> Adapted:
        """Change a file to [N,3,H,W] in and FP32 [N,classes] out."""
        pair = (names[0], names[1]) if names else None
        scores, changes = adaptation.adapt_file(path, adaptation.Choices(choices.output, activation, pair))
        return Adapted((scores,), changes)

    def read_form(
        self, original: Signature, signature: Signature, outputs: Sequence[str], choices: Choices, labels: int
    ) -> Form:
        """Read input and scores."""
        return form.read(original, signature, form.scores_of(signature, outputs[0]), choices.size)

    def models(self, names: Names, form: Form, choices: Choices, properties: Properties) -> Addition:
        """Return an ensemble: the scores are those of the network."""
        return Addition(names, form.image, form.outputs, properties)

    def activation(self, choices: Choices, seen: Survey) -> Activation:
        """Return the one that turns the scores into probabilities.

        Raises:
            WrongUsage: they are probabilities already, or nothing says what they are.
        """
        rule = choices.activation
        if rule == "auto" and seen.meaning == NUMBER:
            raise WrongUsage(
                "the network returns one number, which may be a logit or a value such as an age; "
                "fix: --activation sigmoid for the probability of a class, or --activation none for a value"
            )
        if rule not in ("auto", "none") and seen.activation == "none":
            raise WrongUsage(
                f"cannot append a {rule}: the scores are probabilities already; fix: leave out --activation"
            )
        return seen.activation if rule == "auto" else rule

    def rows(self, form: Form, seen: Survey) -> list[tuple[str, str]]:
        """Return the number of classes, and the kind of the scores."""
        return [("scores", f"{form.classes} classes, {seen.meaning}")]

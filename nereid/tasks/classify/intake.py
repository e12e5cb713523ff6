"""Classification: one output with a score for each class."""

from collections.abc import Sequence
from pathlib import Path

from nereid.base.errors import WrongUsage
from nereid.models.publish.configs import Addition, Names
from nereid.models.publish.examination.examine import Survey
from nereid.models.publish.examination.score_outputs import NUMBER
from nereid.models.publish.intake import adaptation
from nereid.models.publish.intake.adaptation import Activation, Adapted, Choices
from nereid.models.publish.intake.image_input import Images
from nereid.models.publish.intake.network_facts import NetworkFacts, Size
from nereid.models.publish.intake.serving_settings import ServingSettings, Tensor, is_grey, read_input
from nereid.repository.onnx_file import describe
from nereid.vision.inference.signature import Signature


class Classification:
    """Networks that return FP32 [N, classes]; it is the task of every file that no other task recognises."""

    name = "classify"
    input = Images()

    def recognises(self, facts: NetworkFacts, size: Size) -> bool:
        """Return whether the metadata names the task, or the only output has two dims."""
        shapes = [each.shape for each in facts.signature.outputs.values()]
        return facts.task == self.name or (len(shapes) == 1 and len(shapes[0]) == 2)

    def adapt(
        self,
        path: Path,
        choices: Choices,
        activation: Activation = "none",
        names: Sequence[str] | None = None,
    ) -> Adapted:
        """Change a file to [N,3,H,W] in and FP32 [N,classes] out."""
        return adaptation.adapt_file(path, choices.output, activation, names)

    def settings(
        self, facts: NetworkFacts, signature: Signature, outputs: Sequence[str], choices: Choices, labels: int
    ) -> ServingSettings:
        """Read input and scores.

        Raises:
            WrongUsage: the output does not have one number per class, or the input is no image.
        """
        scores = signature.outputs[outputs[0]]
        if len(scores.shape) != 2 or scores.shape[1] < 1 or scores.datatype != "TYPE_FP32":
            raise WrongUsage(
                f"output '{outputs[0]}': expected scores as FP32 [N,classes], got {describe(scores)}; "
                "fix: name another output with --output, or export the network with a fixed number of "
                "classes, or --task detect if it returns boxes"
            )
        image, is_last = read_input(signature.inputs, choices.size)
        used = Tensor(outputs[0], scores.datatype, scores.shape[1:])
        return ServingSettings(image, (used,), is_last, is_grey(facts.signature), scores.shape[1])

    def models(self, names: Names, settings: ServingSettings, choices: Choices) -> Addition:
        """Return an ensemble: the scores are those of the network."""
        return Addition(names, settings)

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

    def rows(self, settings: ServingSettings, seen: Survey) -> list[tuple[str, str]]:
        """Return the number of classes, and the kind of the scores."""
        return [("scores", f"{settings.classes} classes, {seen.meaning}")]

"""Detection: outputs with boxes and scores, in one of the layouts of `nereid.tasks.detect`."""

from collections.abc import Sequence
from pathlib import Path

from nereid.base.contract import BOX, LABEL, MAX_OBJECTS, SCORE
from nereid.base.errors import WrongUsage
from nereid.models.publish.candidate import LABELS
from nereid.models.publish.configs import Addition, LastStep, Names
from nereid.models.publish.examination.examine import Survey
from nereid.models.publish.intake import adaptation
from nereid.models.publish.intake.adaptation import Activation, Adapted, Choices
from nereid.models.publish.intake.graph_edits import COLOURS
from nereid.models.publish.intake.image_input import Images, returns_one_image
from nereid.models.publish.intake.network_facts import NetworkFacts, Size
from nereid.models.publish.intake.serving_settings import ServingSettings, Tensor, is_grey, read_input
from nereid.repository import onnx_file
from nereid.tasks.detect.head import Head, UnknownHead, find_head
from nereid.tasks.detect.layouts import Frame, NetworkOutput
from nereid.vision.inference.signature import Signature

RESULTS = (
    Tensor(BOX, "TYPE_FP32", (-1, 4)),
    Tensor(SCORE, "TYPE_FP32", (-1,)),
    Tensor(LABEL, "TYPE_STRING", (-1,)),
)


class Detection:
    """Networks that return boxes; a model of the backend `boxes` turns their outputs into objects."""

    name = "detect"
    input = Images()

    def recognises(self, facts: NetworkFacts, size: Size) -> bool:
        """Return whether the metadata names the task, or the outputs have exactly one layout."""
        if facts.task:
            return facts.task == self.name
        if returns_one_image(facts.signature):
            return True
        shapes = [each.shape for each in facts.signature.inputs.values()]
        if len(shapes) != 1 or len(shapes[0]) != 4:
            return False
        sides = shapes[0][1:3] if shapes[0][3] in COLOURS and shapes[0][1] not in COLOURS else shapes[0][2:]
        height, width = (known if each == -1 else each for each, known in zip(sides, size, strict=True))
        try:
            find_head(_outputs(facts.signature), Frame(height, width), labels=len(facts.labels))
        except UnknownHead:
            return False
        return True

    def adapt(
        self,
        path: Path,
        choices: Choices,
        activation: Activation = "none",
        names: Sequence[str] | None = None,
    ) -> Adapted:
        """Change a file to [N,3,H,W] in and outputs of N rows; numbers become FP32."""
        is_unbatched = returns_one_image(onnx_file.read(path).signature)
        changes = adaptation.add_batch_to_file(path) if is_unbatched else []
        changes += adaptation.adapt_outputs_of_file(path, choices.size)
        signature = onnx_file.read(path).signature
        if not names:
            return Adapted(tuple(signature.outputs), changes)
        image, head, _ = _read(signature, choices, 0)
        present = [image.name, *(each.name for each in head.outputs)]
        return Adapted(tuple(names[1:]), [*changes, *adaptation.rename_file(path, present, names)])

    def settings(
        self, facts: NetworkFacts, signature: Signature, outputs: Sequence[str], choices: Choices, labels: int
    ) -> ServingSettings:
        """Read the input, and the outputs that the head uses.

        Raises:
            WrongUsage: no layout fits, or it is not certain; or the input is no image.
        """
        image, head, is_last = _read(signature, choices, labels)
        for each in head.outputs:
            if not signature.outputs[each.name].can_batch:
                found = onnx_file.describe(signature.outputs[each.name])
                raise WrongUsage(f"output '{each.name}': expected rows of a batch, got {found}")
        used = tuple(Tensor(each.name, each.datatype, each.dims) for each in head.outputs)
        return ServingSettings(image, used, is_last, is_grey(facts.signature), head.classes, head.name)

    def models(self, names: Names, settings: ServingSettings, choices: Choices) -> Addition:
        """Return an ensemble with a model of the backend `boxes` at the end."""
        labels = {"labels": LABELS} if settings.has_labels else {}
        parameters = {"head": settings.head, **labels, **choices.last_step}
        return Addition(names, settings, LastStep(f"{names.route}_boxes", "boxes", RESULTS, parameters))

    def activation(self, choices: Choices, seen: Survey) -> Activation:
        """Return none: the head knows which outputs are probabilities."""
        return "none"

    def rows(self, settings: ServingSettings, seen: Survey) -> list[tuple[str, str]]:
        """Return the head, and the bound of the objects."""
        classes = f"{settings.classes} classes" if settings.classes else "any number of classes"
        return [("head", f"{settings.head}, {classes}"), ("objects", f"at most {MAX_OBJECTS} per image")]


def _outputs(signature: Signature) -> list[NetworkOutput]:
    return [NetworkOutput(each, about.datatype, about.shape[1:]) for each, about in signature.outputs.items()]


def _read(signature: Signature, choices: Choices, labels: int) -> tuple[Tensor, Head, bool]:
    """Return the input and the head of a network, and whether its layout is NHWC; errors as `settings`."""
    image, is_last = read_input(signature.inputs, choices.size)
    height, width = image.dims[:2] if is_last else image.dims[1:]
    try:
        return image, find_head(_outputs(signature), Frame(height, width), choices.head, labels), is_last
    except UnknownHead as error:
        raise WrongUsage(str(error)) from None

"""Detection: outputs with boxes and scores, in one of the layouts of `nereid.detection`."""

from collections.abc import Sequence
from pathlib import Path

from nereid.contract import BOX, LABEL, MAX_OBJECTS, SCORE
from nereid.detection.decoding import Frame
from nereid.detection.head import Head, UnknownHead, find_head
from nereid.detection.layouts import Output
from nereid.errors import WrongUsage
from nereid.inference.signature import Signature
from nereid.publish.candidate import LABELS
from nereid.publish.configs import Addition, LastStep, Names, Properties, Tensor
from nereid.publish.examination.examine import Survey
from nereid.publish.intake import adaptation, form
from nereid.publish.intake.adaptation import Activation
from nereid.publish.intake.exporters import Size
from nereid.publish.intake.form import Form
from nereid.publish.intake.metadata import Metadata
from nereid.publish.intake.tasks.image_input import Images, returns_one_image
from nereid.publish.intake.tasks.task import Adapted, Choices
from nereid.repository import onnx_file

# Channels of grey and colour images.
COLOURS = (1, 3)
RESULTS = (
    Tensor(BOX, "TYPE_FP32", (-1, 4)),
    Tensor(SCORE, "TYPE_FP32", (-1,)),
    Tensor(LABEL, "TYPE_STRING", (-1,)),
)


class Detection:
    """Networks that return boxes; a model of the backend `boxes` turns their outputs into objects."""

    name = "detect"
    input = Images()

    def recognises(self, signature: Signature, meta: Metadata, size: Size) -> bool:
        """Return whether the metadata names the task, or the outputs have exactly one layout."""
        if meta.task:
            return meta.task == self.name
        if returns_one_image(signature):
            return True
        shapes = [each.shape for each in signature.inputs.values()]
        if len(shapes) != 1 or len(shapes[0]) != 4:
            return False
        sides = shapes[0][1:3] if shapes[0][3] in COLOURS and shapes[0][1] not in COLOURS else shapes[0][2:]
        height, width = (known if each == -1 else each for each, known in zip(sides, size, strict=True))
        try:
            find_head(_outputs(signature), Frame(height, width), labels=len(meta.labels))
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
        image, is_last = form.read_input(signature.inputs, choices.size)
        head = _head(signature, image, is_last, choices.head, 0)
        found = [each.name for each in head.outputs]
        return Adapted(
            tuple(names[1:]), [*changes, *adaptation.rename_file(path, [image.name, *found], names)]
        )

    def read_form(
        self, original: Signature, signature: Signature, outputs: Sequence[str], choices: Choices, labels: int
    ) -> Form:
        """Read the input, and the outputs that the head uses."""
        image, is_last = form.read_input(signature.inputs, choices.size)
        head = _head(signature, image, is_last, choices.head, labels)
        for each in head.outputs:
            if not signature.outputs[each.name].can_batch:
                found = onnx_file.describe(signature.outputs[each.name])
                raise WrongUsage(f"output '{each.name}': expected rows of a batch, got {found}")
        used = tuple(Tensor(each.name, each.datatype, each.dims) for each in head.outputs)
        return form.read(original, signature, used, choices.size, head.classes, head.name)

    def models(self, names: Names, form: Form, choices: Choices, properties: Properties) -> Addition:
        """Return an ensemble with a model of the backend `boxes` at the end."""
        labels = {"labels": LABELS} if properties.has_labels else {}
        parameters = {"head": form.head, **labels, **choices.last_step}
        last = LastStep(f"{names.route}_boxes", "boxes", RESULTS, tuple(parameters.items()))
        return Addition(names, form.image, form.outputs, properties, last)

    def activation(self, choices: Choices, seen: Survey) -> Activation:
        """Return none: the head knows which outputs are probabilities."""
        return "none"

    def rows(self, form: Form, seen: Survey) -> list[tuple[str, str]]:
        """Return the head, and the bound of the objects."""
        classes = f"{form.classes} classes" if form.classes else "any number of classes"
        return [("head", f"{form.head}, {classes}"), ("objects", f"at most {MAX_OBJECTS} per image")]


def _outputs(signature: Signature) -> list[Output]:
    return [Output(each, about.datatype, about.shape[1:]) for each, about in signature.outputs.items()]


def _head(signature: Signature, image: Tensor, is_last: bool, name: str, labels: int) -> Head:
    """Return the head of a network.

    Raises:
        WrongUsage: no layout fits, or it is not certain.
    """
    height, width = image.dims[:2] if is_last else image.dims[1:]
    try:
        return find_head(_outputs(signature), Frame(height, width), name, labels)
    except UnknownHead as error:
        raise WrongUsage(str(error)) from None

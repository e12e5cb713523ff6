"""Detection: box and score outputs in one of the layouts of `nereid.tasks.detect`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nereid.base.config.model_config import ServedTensor
from nereid.base.contract import MAX_OBJECTS
from nereid.base.errors import WrongUsage
from nereid.models.publish.configs import Addition, ModelNames, PostprocessStep
from nereid.models.publish.examination import FirstRun
from nereid.models.publish.importing import adaptation
from nereid.models.publish.importing.adaptation import Adapted, Names, NetworkChoices
from nereid.models.publish.importing.graph_edits import COLOURS, Activation, add_batch
from nereid.models.publish.importing.model_importer import ModelImporter, ScreenRows
from nereid.models.publish.importing.network_facts import (
    ANY_SIZE,
    ULTRALYTICS,
    ExporterSettings,
    NetworkFacts,
    Size,
    literal,
    ultralytics_size,
)
from nereid.models.publish.importing.serving_settings import ServingSettings, is_grey, read_input
from nereid.models.publish.staged_version import LABELS
from nereid.repository import onnx_file
from nereid.repository.check import CheckStatus, Profile
from nereid.tasks.detect.detector import OUTPUTS, ObjectFinder
from nereid.tasks.detect.head import Head, UnknownHead, find_head
from nereid.tasks.detect.layouts import LAYOUTS, InputSize
from nereid.vision.imaging.preprocess_settings import PRESETS
from nereid.vision.inference.signature import Signature


def check(profile: Profile, model: str) -> Iterator[tuple[CheckStatus, str]]:
    """Yield the head of each version of a `boxes` model; raises InvalidConfig."""
    for version in profile.versions(model):
        head = ObjectFinder.from_config(profile.config(model, version)).head
        yield "ok", f"head {head.name}" + (f", {head.classes} classes" if head.classes else "")


# The longer side of COCO photos is 640 pixels.
USUAL_SIZE = (640, 640)


def lacks_batch_dimension(signature: Signature) -> bool:
    """Return whether results have no batch dimension, as with torchvision's detectors."""
    outputs = [
        ServedTensor(name, tensor.datatype, tensor.shape) for name, tensor in signature.outputs.items()
    ]
    ranks = [len(tensor.shape) for tensor in signature.inputs.values()]
    return ranks in ([3], [4]) and bool(LAYOUTS["torchvision"].find(outputs))


class DetectorImporter(ModelImporter):
    """Networks that return boxes; a model of the `boxes` backend converts their outputs to objects."""

    name, rank, results = "detect", 20, "objects"

    def usual_size(self, signature: Signature) -> Size:
        """Return the size for a network that resizes its images itself; zeros for other networks."""
        is_tensorflow = LAYOUTS["tensorflow"].find([ServedTensor(name, "", ()) for name in signature.outputs])
        return USUAL_SIZE if is_tensorflow or lacks_batch_dimension(signature) else ANY_SIZE

    @staticmethod
    def exporter_settings(metadata: Mapping[str, str]) -> ExporterSettings | None:
        """Return the head and a letterbox resize or, for RT-DETR, a plain resize."""
        if metadata.get("task") != "detect":
            return None
        exported = literal(metadata.get("args", ""))
        has_nms = isinstance(exported, dict) and bool(exported.get("nms"))
        description = metadata.get("description", "").lower()
        is_rtdetr = "rtdetr" in description
        # Older exports of YOLOv10, which needs no NMS, do not note that.
        is_end_to_end = metadata.get("end2end", str("yolov10" in description)) == "True"
        head = ""
        if is_end_to_end or has_nms:
            head = "nms"
        elif is_rtdetr:
            # Ever since Ultralytics records the head, the decoder returns only the best class of each row.
            head = "rtdetr_best" if metadata.get("head") == "RTDETRDecoder" else "rtdetr"
        preset = PRESETS["rtdetr" if is_rtdetr else "yolo"]
        return ExporterSettings(preset, ULTRALYTICS, ultralytics_size(metadata), head)

    def recognises(self, facts: NetworkFacts, size: Size) -> bool:
        """Return whether the metadata names the task, or the outputs match exactly one layout."""
        if facts.task:
            return facts.task == self.name
        if lacks_batch_dimension(facts.signature):
            return True
        shapes = [tensor.shape for tensor in facts.signature.inputs.values()]
        if len(shapes) != 1 or len(shapes[0]) != 4:
            return False
        sides = shapes[0][1:3] if shapes[0][3] in COLOURS and shapes[0][1] not in COLOURS else shapes[0][2:]
        height, width = (known if side == -1 else side for side, known in zip(sides, size, strict=True))
        try:
            find_head(_outputs(facts.signature), InputSize(height, width), labels=len(facts.labels))
        except UnknownHead:
            return False
        return True

    def adapt(
        self, path: Path, choices: NetworkChoices, activation: Activation = "none", names: Names = None
    ) -> Adapted:
        """Change a file to take [N,3,H,W] and return outputs of N rows; numbers become FP32."""
        original = onnx_file.read(path).signature
        is_unbatched = lacks_batch_dimension(original)
        if not is_unbatched:
            _check_inputs(original)
        changes = adaptation.edit_file(path, add_batch) if is_unbatched else []
        changes += adaptation.adapt_outputs_of_file(path, choices.size)
        signature = onnx_file.read(path).signature
        if not names:
            return Adapted(tuple(signature.outputs), changes)
        image, head, _ = _read(signature, choices, 0)
        present = [image.name, *(output.name for output in head.outputs)]
        return Adapted(tuple(names[1:]), [*changes, *adaptation.rename_file(path, present, names)])

    def settings(
        self, facts: NetworkFacts, signature: Signature, outputs: Sequence[str], choices: NetworkChoices
    ) -> ServingSettings:
        """Read the input and the outputs used by the head."""
        image, head, is_channels_last = _read(signature, choices, len(choices.labels or facts.labels))
        _check_classes(head, facts, signature, choices)
        for output in head.outputs:
            if not signature.outputs[output.name].can_batch:
                got = onnx_file.describe(signature.outputs[output.name])
                raise WrongUsage(f"output '{output.name}': expected rows of a batch, got {got}")
        form = head.classes, head.name, head.layout.preprocessing
        return ServingSettings(image, head.outputs, is_channels_last, is_grey(facts.signature), *form)

    def models(self, names: ModelNames, settings: ServingSettings, choices: NetworkChoices) -> Addition:
        """Return an ensemble whose post-processing is a model of the `boxes` backend."""
        labels = {"labels": LABELS} if settings.has_labels else {}
        parameters = {"head": settings.head, **labels, **choices.post_processing}
        results = tuple(ServedTensor(name, *kind) for name, kind in OUTPUTS.items())
        step = PostprocessStep(f"{names.route}_boxes", "boxes", results, parameters)
        return Addition(names, settings, last=step)

    def rows(self, settings: ServingSettings, first_run: FirstRun, activation: Activation) -> ScreenRows:
        """Return the head and the maximum number of objects."""
        classes = f"{settings.classes} classes" if settings.classes else "any number of classes"
        return [("head", f"{settings.head}, {classes}"), ("objects", f"at most {MAX_OBJECTS} per image")]

    def shown(self, results: Sequence[Any]) -> str:
        """Return the label, score and box of each object."""
        return ", ".join(map(_object, results)) or "no object"


def _object(found: Mapping[str, Any]) -> str:
    return f"{found['label']} {found['score']:.2f} at {', '.join(f'{side:.0f}' for side in found['box'])}"


def _outputs(signature: Signature) -> list[ServedTensor]:
    return [ServedTensor(name, about.datatype, about.shape[1:]) for name, about in signature.outputs.items()]


def _check_inputs(original: Signature) -> None:
    """Raise WrongUsage for a network whose inputs cannot be changed to a batch of images."""
    if len(original.inputs) > 1:
        raise WrongUsage(
            f"expected a network with one input, for images, got: {', '.join(original.inputs)}; "
            "fix: export it with the images as its only input, without post-processing"
        )
    if any(len(tensor.shape) != 4 for tensor in original.inputs.values()):
        read_input(original.inputs, ANY_SIZE)


def _check_classes(head: Head, facts: NetworkFacts, signature: Signature, choices: NetworkChoices) -> None:
    """Raise WrongUsage if the head would read other numbers as classes, such as coefficients of masks."""
    if masks := head.mask_prototypes(_outputs(signature)):
        got = onnx_file.describe(signature.outputs[masks.name])
        raise WrongUsage(
            f"output '{masks.name}': expected a network for boxes, got prototypes of masks, {got}, which "
            "cannot be served; fix: export a network for detection"
        )
    names = len(choices.labels or facts.labels)
    if not names or head.classes in (0, names):
        return
    if choices.labels:
        raise WrongUsage(
            f"{choices.labels_from}: expected {head.classes} lines, one for each class of head {head.name}, "
            f"got {names}; fix: a line for each number from 0 to {head.classes - 1}, also for unused ones"
        )
    if not choices.head:
        raise WrongUsage(
            f"{facts.labels_from}: expected a name for each of the {head.classes} classes of head "
            f"{head.name}, got {names}; other numbers may be masks, key points or angles; fix: a network for "
            f"detection, --labels with {head.classes} names, or --head {head.name} to serve it without names"
        )


def _read(signature: Signature, choices: NetworkChoices, labels: int) -> tuple[ServedTensor, Head, bool]:
    """Return a network's input and head, and whether its layout is NHWC; errors as for `settings`."""
    image, is_channels_last = read_input(signature.inputs, choices.size)
    height, width = image.dims[:2] if is_channels_last else image.dims[1:]
    try:
        head = find_head(_outputs(signature), InputSize(height, width), choices.head, labels)
    except UnknownHead as error:
        raise WrongUsage(str(error)) from None
    return image, head, is_channels_last

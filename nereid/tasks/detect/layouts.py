"""The layouts in which detectors return objects: how each is recognised, and what decodes it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nereid.tasks.detect import decoding
from nereid.tasks.detect.decoding import STRIDES_PX, Decode, Frame

# Outputs of TensorFlow's Object Detection API. Source: tensorflow/models, object_detection/exporter.py.
TENSORFLOW = ("num_detections", "detection_boxes", "detection_scores", "detection_classes")
# Anchors per cell of YOLOv5. Source: ultralytics/yolov5, models/yolov5s.yaml.
ANCHORS_PER_CELL = 3


class Output(NamedTuple):
    """An output of a network: name, Triton's datatype, dims without the batch, -1 for variable ones."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of a detector's outputs.

    Attributes:
        form: the outputs as messages show them.
        find: returns the outputs by their role; () if the layout does not fit.
        decode: one image's outputs by role, the frame and the smallest score to candidates.
        count_classes: number of classes, from the outputs by role; 0 if the shapes do not have it.
        suppresses: whether the network has removed boxes of the same object itself.
        first_class: the network's number of its first class.
        preprocessing: what is left to do in front of a network that resizes or normalises its images itself.
    """

    form: str
    find: Callable[[Sequence[Output]], tuple[Output, ...]]
    decode: Decode
    count_classes: Callable[[Sequence[Output]], int] = lambda found: 0
    suppresses: bool = False
    first_class: int = 0
    preprocessing: Mapping[str, str] = field(default_factory=dict)


def grid_cells(frame: Frame, strides_px: Sequence[int] = STRIDES_PX) -> int:
    """Return the number of cells of all grids over a frame."""
    return sum((frame.height_px // stride) * (frame.width_px // stride) for stride in strides_px)


def _only_matrix(outputs: Sequence[Output]) -> tuple[Output, ...]:
    """Return the only output with two dims; some exports return the grids, too."""
    found = [each for each in outputs if len(each.dims) == 2]
    return tuple(found) if len(found) == 1 else ()


def _find_rows(outputs: Sequence[Output]) -> tuple[Output, ...]:
    found = _only_matrix(outputs)
    return found if found and found[0].dims[1] > 5 else ()


def _find_columns(outputs: Sequence[Output]) -> tuple[Output, ...]:
    found = _only_matrix(outputs)
    return found if found and found[0].dims[0] > 4 else ()


def _find_queries(outputs: Sequence[Output]) -> tuple[Output, ...]:
    """Return logits [Q, K] and boxes [Q, 4]; other outputs, such as hidden states, are skipped."""
    matrices = [each for each in outputs if len(each.dims) == 2]
    boxes = [
        each for each in matrices if each.dims[1] == 4 or (each.dims[1] < 0 and "box" in each.name.lower())
    ]
    if len(boxes) > 1:
        boxes = [each for each in boxes if "box" in each.name.lower()]
    logits = [each for each in matrices if each not in boxes and each.dims[1] > 0]
    if len(logits) > 1:
        logits = [each for each in logits if any(word in each.name.lower() for word in ("logit", "class"))]
    if len(boxes) != 1 or len(logits) != 1 or boxes[0].dims[0] != logits[0].dims[0]:
        return ()
    return logits[0], boxes[0]


def _find_fractions(outputs: Sequence[Output]) -> tuple[Output, ...]:
    found = _only_matrix(outputs)
    return found if found and found[0].dims[1] > 4 else ()


def _find_best(outputs: Sequence[Output]) -> tuple[Output, ...]:
    found = _only_matrix(outputs)
    return found if found and found[0].dims[1] == 6 else ()


def _find_torchvision(outputs: Sequence[Output]) -> tuple[Output, ...]:
    """Return boxes [M, 4], scores [M], classes [M]; exporters choose names and order."""
    kinds = {(each.datatype, each.dims[1:] if each.dims else (0,)): each for each in outputs}
    wanted = (("TYPE_FP32", (4,)), ("TYPE_FP32", ()), ("TYPE_INT64", ()))
    return tuple(kinds[each] for each in wanted) if len(outputs) == 3 and kinds.keys() == {*wanted} else ()


def _find_tensorflow(outputs: Sequence[Output]) -> tuple[Output, ...]:
    by_name = {each.name.partition(":")[0]: each for each in outputs}
    return tuple(by_name[name] for name in TENSORFLOW) if by_name.keys() >= set(TENSORFLOW) else ()


def _find_suppressed(outputs: Sequence[Output]) -> tuple[Output, ...]:
    """Return [M, 6 or 7]; or [M, 5] and classes [M]; or the number, boxes [M, 4], scores [M], classes [M]."""
    matrices = [each for each in outputs if len(each.dims) == 2]
    vectors = [each for each in outputs if len(each.dims) == 1 and each.dims != (1,)]
    single = [each for each in outputs if each.dims in ((), (1,))]
    if len(matrices) != 1 or _find_tensorflow(outputs):
        return ()
    width = matrices[0].dims[1]
    if len(outputs) == 1 and width in (6, 7):
        return tuple(matrices)
    if len(outputs) == len(vectors) + 1 == 2 and width == 5:
        return matrices[0], vectors[0]
    if len(outputs) != 4 or len(single) != 1 or len(vectors) != 2 or width != 4:
        return ()
    classes = [each for each in vectors if "INT" in each.datatype] or [
        each for each in vectors if any(word in each.name.lower() for word in ("class", "label"))
    ]
    if len(classes) != 1:
        return ()
    (scores,) = (each for each in vectors if each not in classes)
    return single[0], matrices[0], scores, classes[0]


LAYOUTS: Mapping[str, Layout] = {
    "yolov5": Layout(
        "[N,anchors,5+classes]", _find_rows, decoding.yolov5, lambda found: found[0].dims[1] - 5
    ),
    "yolov8": Layout(
        "[N,4+classes,anchors]", _find_columns, decoding.yolov8, lambda found: found[0].dims[0] - 4
    ),
    "yolox": Layout(
        "[N,anchors,5+classes], not decoded", _find_rows, decoding.yolox, lambda found: found[0].dims[1] - 5
    ),
    "detr": Layout(
        "logits [N,Q,classes+1] and boxes [N,Q,4]",
        _find_queries,
        decoding.detr,
        lambda found: found[0].dims[1] - 1,
        suppresses=True,
    ),
    "detr_sigmoid": Layout(
        "logits [N,Q,classes] and boxes [N,Q,4]",
        _find_queries,
        decoding.detr_sigmoid,
        lambda found: found[0].dims[1],
        suppresses=True,
    ),
    "yolonas": Layout(
        "boxes [N,anchors,4] and scores [N,anchors,classes]",
        _find_queries,
        decoding.cornered,
        lambda found: found[0].dims[1],
    ),
    "rtdetr": Layout(
        "[N,Q,4+classes], boxes as parts of the image",
        _find_fractions,
        decoding.fractions,
        lambda found: found[0].dims[1] - 4,
        suppresses=True,
    ),
    "rtdetr_best": Layout(
        "[N,Q,6]: boxes as parts of the image, score, class",
        _find_best,
        decoding.fractions_best,
        suppresses=True,
    ),
    "tensorflow": Layout(
        ", ".join(TENSORFLOW),
        _find_tensorflow,
        decoding.tensorflow,
        suppresses=True,
        first_class=1,
        preprocessing={"resize": "exact"},
    ),
    "torchvision": Layout(
        "boxes [N,M,4], scores [N,M] and INT64 classes [N,M]",
        _find_torchvision,
        decoding.suppressed,
        suppresses=True,
        # Source: torchvision, models/detection/transform.py; the network resizes and normalises.
        preprocessing={"resize": "exact", "scale": str(1 / 255)},
    ),
    "nms": Layout(
        "[N,M,6 or 7], or [N,M,5] and classes [N,M], or number, boxes [N,M,4], scores, classes [N,M]",
        _find_suppressed,
        decoding.suppressed,
        suppresses=True,
    ),
}

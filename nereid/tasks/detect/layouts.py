"""Output layouts of detectors: how each one is recognised and decoded to candidates."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nereid.base.config.model_config import ServedTensor
from nereid.base.task_outputs import softmax

# Pixels per cell of the grids that YOLO networks predict on.
# Source: Megvii-BaseDetection/YOLOX, models/yolo_head.py.
STRIDES_PX = (8, 16, 32)
# A larger exponent exceeds any image and overflows.
MAX_EXPONENT = 80.0


class InputSize(NamedTuple):
    """Height and width of the network's input, in pixels."""

    height_px: int
    width_px: int


class Candidates(NamedTuple):
    """Possible objects of one image.

    Attributes:
        boxes: float64[K, 4]: left, top, right, bottom in pixels of the network's input.
        scores: float32[K].
        classes: int64[K]; a negative class, as in the rows that pad the results of NMS, is no object.
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


Rows = Sequence[np.ndarray]
Decode = Callable[[Rows, InputSize, float], Candidates]


def yolov5(rows: Rows, input_size: InputSize, threshold: float) -> Candidates:
    """Decode [A, 5 + C]: centre and size in pixels, objectness, one probability per class."""
    (matrix,) = rows
    matrix = matrix[matrix[:, 4] >= threshold]
    classes, best = _best(matrix[:, 5:])
    return Candidates(_corners(matrix[:, :4]), matrix[:, 4] * best, classes)


def yolox(rows: Rows, input_size: InputSize, threshold: float) -> Candidates:
    """Decode [A, 5 + C]: as YOLOv5, but with offsets in cells and logarithms of sizes in cells."""
    (matrix,) = rows
    is_likely = matrix[:, 4] >= threshold
    matrix, cells = matrix[is_likely], cell_grid(input_size)[is_likely]
    strides_px = cells[:, 2:]
    raw = matrix[:, :4].astype(np.float64)
    centers = (raw[:, :2] + cells[:, :2]) * strides_px
    sizes = np.exp(np.minimum(raw[:, 2:], MAX_EXPONENT)) * strides_px
    classes, best = _best(matrix[:, 5:])
    return Candidates(_corners(np.concatenate([centers, sizes], axis=1)), matrix[:, 4] * best, classes)


def cell_grid(input_size: InputSize) -> np.ndarray:
    """Return each cell's column, row and stride, float64[cells, 3], in YOLOX's order."""
    parts = []
    for stride in STRIDES_PX:
        rows, columns = np.mgrid[: input_size.height_px // stride, : input_size.width_px // stride]
        parts.append(np.stack([columns.ravel(), rows.ravel(), np.full(rows.size, stride)], axis=1))
    cells: np.ndarray = np.concatenate(parts).astype(np.float64)
    return cells


def yolov8(rows: Rows, input_size: InputSize, threshold: float) -> Candidates:
    """Decode [4 + C, A]: centre and size in pixels, one probability per class; no objectness."""
    (matrix,) = rows
    scores = matrix[4:].max(0)
    is_likely = scores >= threshold
    classes = matrix[4:, is_likely].argmax(0)
    return Candidates(_corners(matrix[:4, is_likely].T), scores[is_likely], classes)


def detr(rows: Rows, input_size: InputSize, threshold: float) -> Candidates:
    """Decode logits [Q, C + 1], whose last class means no object, and boxes [Q, 4]."""
    logits, boxes = rows
    return _queries(softmax(logits.astype(np.float64))[:, :-1], boxes, input_size)


def detr_sigmoid(rows: Rows, input_size: InputSize, threshold: float) -> Candidates:
    """Decode logits [Q, C] of independent classes, and boxes [Q, 4]."""
    logits, boxes = rows
    powers = np.exp(-np.abs(logits.astype(np.float64)))
    return _queries(np.where(logits >= 0, 1, powers) / (1 + powers), boxes, input_size)


def _queries(probabilities: np.ndarray, boxes: np.ndarray, input_size: InputSize) -> Candidates:
    """Return candidates from probabilities [Q, C] and boxes [Q, 4]: centre, size as input fractions."""
    classes, best = _best(probabilities)
    height, width = input_size
    sized = boxes.astype(np.float64) * (width, height, width, height)
    return Candidates(_corners(sized), best.astype(np.float32), classes)


def cornered(rows: Rows, input_size: InputSize, threshold: float) -> Candidates:
    """Decode probabilities [A, C] and boxes [A, 4]: corners in pixels."""
    scores, boxes = rows
    classes, best = _best(scores)
    return Candidates(boxes.astype(np.float64), best, classes)


def fractions(rows: Rows, input_size: InputSize, threshold: float) -> Candidates:
    """Decode [Q, 4 + C]: centre and size as fractions of the input, one probability per class."""
    (matrix,) = rows
    return _queries(matrix[:, 4:], matrix[:, :4], input_size)


def fractions_best(rows: Rows, input_size: InputSize, threshold: float) -> Candidates:
    """Decode [Q, 6]: centre and size as fractions of the input, score, class."""
    (matrix,) = rows
    matrix = matrix[matrix[:, 4] >= threshold]
    sized = matrix[:, :4].astype(np.float64) * ([input_size.width_px, input_size.height_px] * 2)
    return Candidates(_corners(sized), matrix[:, 4], matrix[:, 5].astype(np.int64))


def tensorflow(rows: Rows, input_size: InputSize, threshold: float) -> Candidates:
    """Decode count, boxes [M, 4] (top, left, bottom, right as input fractions), scores, classes from 1."""
    boxes, scores, classes = _nms_parts(rows)
    kept = scores >= threshold
    height, width = input_size
    corners = boxes[kept][:, [1, 0, 3, 2]].astype(np.float64) * (width, height, width, height)
    return Candidates(corners, scores[kept], classes[kept].astype(np.int64) - 1)


def decode_nms(rows: Rows, input_size: InputSize, threshold: float) -> Candidates:
    """Decode the output of a network with built-in NMS: corners in pixels of its input."""
    boxes, scores, classes = _nms_parts(rows)
    kept = scores >= threshold
    return Candidates(boxes[kept].astype(np.float64), scores[kept], classes[kept].astype(np.int64))


def _nms_parts(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if len(rows) > 2:
        boxes, scores, classes = used_rows(rows)[-3:]
        return boxes, scores, classes
    if len(rows) == 2:
        matrix, classes = rows
        return matrix[:, :4], matrix[:, 4], classes
    (matrix,) = rows
    scores = matrix[:, 4] if matrix.shape[1] == 6 else matrix[:, 4] * matrix[:, 5]
    return matrix[:, :4], scores, matrix[:, -1]


def used_rows(rows: Rows) -> Rows:
    """Return the meaningful rows; the other rows of a network with built-in NMS may hold anything."""
    if len(rows) < 4:
        return rows
    count = max(0, int(rows[0].reshape(-1)[0]))
    return [rows[0], *(part[:count] for part in rows[1:])]


def _best(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    classes = scores.argmax(1)
    return classes, np.take_along_axis(scores, classes[:, None], 1)[:, 0]


def _corners(boxes: np.ndarray) -> np.ndarray:
    boxes = boxes.astype(np.float64)
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


# Outputs of TensorFlow's Object Detection API. Source: tensorflow/models, object_detection/exporter.py.
TENSORFLOW = ("num_detections", "detection_boxes", "detection_scores", "detection_classes")
# Anchors per cell of YOLOv5. Source: ultralytics/yolov5, models/yolov5s.yaml.
ANCHORS_PER_CELL = 3


Find = Callable[[Sequence[ServedTensor]], tuple[ServedTensor, ...]]


@dataclass(frozen=True, slots=True)
class Layout:
    """A detector output layout.

    Attributes:
        form: the outputs as shown in messages.
        find: returns the outputs by role; () if the layout does not match.
        decode: converts one image's outputs by role and the input size to candidates; it may leave out those
            below the minimum score.
        classes: class axis of the first output, and its other entries; () if the shapes have no classes.
        has_nms: whether the network itself has already removed boxes of the same object.
        has_logits: whether its numbers for classes are logits instead of probabilities.
        first_class: the network's number for its first class.
        preprocessing: what remains to be done for a network that resizes or normalises its images itself.
    """

    form: str
    find: Find
    decode: Decode
    classes: tuple[int, int] | tuple[()] = ()
    has_nms: bool = False
    has_logits: bool = False
    first_class: int = 0
    preprocessing: Mapping[str, str] = field(default_factory=dict)


def grid_cells(input_size: InputSize, strides_px: Sequence[int] = STRIDES_PX) -> int:
    """Return the total number of cells of all grids over the input."""
    return sum((input_size.height_px // stride) * (input_size.width_px // stride) for stride in strides_px)


def _matrix(fits: Callable[[tuple[int, ...]], bool]) -> Find:
    """Find the only output with two dims, if they match; some exports also return the grids.

    Another output with as many rows is a part of each object, such as its class or box.
    """

    def find(outputs: Sequence[ServedTensor]) -> tuple[ServedTensor, ...]:
        matrices = [output for output in outputs if len(output.dims) == 2]
        if len(matrices) != 1 or not fits(matrices[0].dims):
            return ()
        rows = [output.dims[0] for output in outputs if output not in matrices and output.dims]
        return () if any(count > 0 and count in matrices[0].dims for count in rows) else tuple(matrices)

    return find


_find_rows = _matrix(lambda dims: dims[1] > 5)
_find_columns = _matrix(lambda dims: dims[0] > 4)


def _find_queries(outputs: Sequence[ServedTensor]) -> tuple[ServedTensor, ...]:
    """Return logits [Q, K] and boxes [Q, 4]; other outputs, such as hidden states, are skipped."""
    matrices = [output for output in outputs if len(output.dims) == 2]
    boxes = [box for box in matrices if box.dims[1] == 4 or (box.dims[1] < 0 and "box" in box.name.lower())]
    if len(boxes) > 1:
        boxes = [box for box in boxes if "box" in box.name.lower()]
    logits = [matrix for matrix in matrices if matrix not in boxes and matrix.dims[1] > 0]
    if len(logits) > 1:
        logits = [logit for logit in logits if any(word in logit.name.lower() for word in ("logit", "class"))]
    if len(boxes) != 1 or len(logits) != 1 or (rows := boxes[0].dims[0]) != logits[0].dims[0]:
        return ()
    # One more number for each row, such as its objectness, would be a part of the score.
    is_partial = any(output.dims in ((rows,), (rows, 1)) and output != logits[0] for output in outputs)
    return () if is_partial else (logits[0], boxes[0])


def _find_torchvision(outputs: Sequence[ServedTensor]) -> tuple[ServedTensor, ...]:
    """Return boxes [M, 4], scores [M], classes [M]; names and order depend on the exporter.

    Other outputs, such as masks and key points, are skipped.
    """
    parts = [output for output in outputs if output.dims[1:] in ((), (4,))]
    kinds = {(output.datatype, output.dims[1:] if output.dims else (0,)): output for output in parts}
    expected = (("TYPE_FP32", (4,)), ("TYPE_FP32", ()), ("TYPE_INT64", ()))
    return tuple(kinds[kind] for kind in expected) if len(parts) == 3 and kinds.keys() == {*expected} else ()


def _find_tensorflow(outputs: Sequence[ServedTensor]) -> tuple[ServedTensor, ...]:
    by_name = {output.name.rpartition("/")[2].partition(":")[0]: output for output in outputs}
    return tuple(by_name[name] for name in TENSORFLOW) if by_name.keys() >= set(TENSORFLOW) else ()


def _find_nms(outputs: Sequence[ServedTensor]) -> tuple[ServedTensor, ...]:
    """Return [M, 6 or 7], or [M, 5] and classes [M], or count, boxes [M, 4], scores [M], classes [M].

    Masks beside the last two forms are skipped.
    """
    outputs = [output for output in outputs if len(output.dims) < 3]
    matrices = [output for output in outputs if len(output.dims) == 2]
    vectors = [output for output in outputs if len(output.dims) == 1 and output.dims != (1,)]
    single = [output for output in outputs if output.dims in ((), (1,))]
    if len(matrices) != 1 or _find_tensorflow(outputs):
        return ()
    width = matrices[0].dims[1]
    if len(outputs) == 1 and width in (6, 7):
        return tuple(matrices)
    if len(outputs) == len(vectors) + 1 == 2 and width == 5:
        return matrices[0], vectors[0]
    if len(outputs) != 4 or len(single) != 1 or len(vectors) != 2 or width != 4:
        return ()
    classes = [vector for vector in vectors if "INT" in vector.datatype] or [
        vector for vector in vectors if any(word in vector.name.lower() for word in ("class", "label"))
    ]
    if len(classes) != 1:
        return ()
    (scores,) = (vector for vector in vectors if vector not in classes)
    return single[0], matrices[0], scores, classes[0]


LAYOUTS: Mapping[str, Layout] = {
    "yolov5": Layout("[N,anchors,5+classes]", _find_rows, yolov5, (1, 5)),
    "yolov8": Layout("[N,4+classes,anchors]", _find_columns, yolov8, (0, 4)),
    "yolox": Layout("[N,anchors,5+classes], not decoded", _find_rows, yolox, (1, 5)),
    "detr": Layout(
        *("logits [N,Q,classes+1] and boxes [N,Q,4]", _find_queries, detr, (1, 1)),
        has_nms=True,
        has_logits=True,
    ),
    "detr_sigmoid": Layout(
        *("logits [N,Q,classes] and boxes [N,Q,4]", _find_queries, detr_sigmoid, (1, 0)),
        has_nms=True,
        has_logits=True,
    ),
    "yolonas": Layout("boxes [N,anchors,4] and scores [N,anchors,classes]", _find_queries, cornered, (1, 0)),
    "rtdetr": Layout(
        "[N,Q,4+classes], boxes as parts of the image",
        _matrix(lambda dims: dims[1] > 4),
        fractions,
        (1, 4),
        has_nms=True,
    ),
    "rtdetr_best": Layout(
        "[N,Q,6]: boxes as parts of the image, score, class",
        _matrix(lambda dims: dims[1] == 6),
        fractions_best,
        has_nms=True,
    ),
    "tensorflow": Layout(
        ", ".join(TENSORFLOW),
        _find_tensorflow,
        tensorflow,
        has_nms=True,
        first_class=1,
        preprocessing={"resize": "exact"},
    ),
    "torchvision": Layout(
        "boxes [N,M,4], scores [N,M] and INT64 classes [N,M]",
        _find_torchvision,
        decode_nms,
        has_nms=True,
        # Source: torchvision, models/detection/transform.py; the network resizes and normalises.
        preprocessing={"resize": "exact", "scale": str(1 / 255)},
    ),
    "nms": Layout(
        "[N,M,6 or 7], or [N,M,5] and classes [N,M], or number, boxes [N,M,4], scores, classes [N,M]",
        _find_nms,
        decode_nms,
        has_nms=True,
    ),
}

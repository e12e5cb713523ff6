"""One image's outputs to candidates in network pixels, by the layout of a detector."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

# Pixels per cell of the grids on which YOLO networks predict.
# Source: Megvii-BaseDetection/YOLOX, models/yolo_head.py.
STRIDES_PX = (8, 16, 32)
# A larger exponent is beyond any image, and overflows.
MAX_EXPONENT = 80.0


class Frame(NamedTuple):
    """Height and width of the network's input, in pixels."""

    height_px: int
    width_px: int


class Candidates(NamedTuple):
    """Possible objects of one image.

    Attributes:
        boxes: float64[K, 4]: left, top, right, bottom in pixels of the network's input.
        scores: float32[K].
        classes: int64[K].
    """

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray


Rows = Sequence[np.ndarray]
Decode = Callable[[Rows, Frame, float], Candidates]


def yolov5(rows: Rows, frame: Frame, threshold: float) -> Candidates:
    """Decode [A, 5 + C]: centre, size in pixels, objectness, probability of each class."""
    (found,) = rows
    found = found[found[:, 4] >= threshold]
    classes, best = _best(found[:, 5:])
    scores = found[:, 4] * best
    is_likely = scores >= threshold
    boxes = _corners(found[is_likely, :4].astype(np.float64))
    return Candidates(boxes, scores[is_likely], classes[is_likely])


def yolox(rows: Rows, frame: Frame, threshold: float) -> Candidates:
    """Decode [A, 5 + C]: as YOLOv5, but offsets in cells and logarithms of sizes in cells."""
    (found,) = rows
    is_likely = found[:, 4] >= threshold
    found, cells = found[is_likely], cell_places(frame)[is_likely]
    strides_px = cells[:, 2:]
    raw = found[:, :4].astype(np.float64)
    centers = (raw[:, :2] + cells[:, :2]) * strides_px
    sizes = np.exp(np.minimum(raw[:, 2:], MAX_EXPONENT)) * strides_px
    classes, best = _best(found[:, 5:])
    scores = found[:, 4] * best
    kept = scores >= threshold
    boxes = _corners(np.concatenate([centers, sizes], axis=1)[kept])
    return Candidates(boxes, scores[kept], classes[kept])


def cell_places(frame: Frame) -> np.ndarray:
    """Return column, row and stride of every cell, float64[cells, 3], in the order of YOLOX."""
    parts = []
    for stride in STRIDES_PX:
        rows, columns = np.mgrid[: frame.height_px // stride, : frame.width_px // stride]
        parts.append(np.stack([columns.ravel(), rows.ravel(), np.full(rows.size, stride)], axis=1))
    places: np.ndarray = np.concatenate(parts).astype(np.float64)
    return places


def yolov8(rows: Rows, frame: Frame, threshold: float) -> Candidates:
    """Decode [4 + C, A]: centre, size in pixels, probability of each class; no objectness."""
    (found,) = rows
    scores = found[4:].max(0)
    is_likely = scores >= threshold
    classes = found[4:, is_likely].argmax(0)
    boxes = _corners(found[:4, is_likely].T.astype(np.float64))
    return Candidates(boxes, scores[is_likely], classes)


def detr(rows: Rows, frame: Frame, threshold: float) -> Candidates:
    """Decode logits [Q, C + 1], the last class being no object, and boxes [Q, 4]."""
    logits, boxes = rows
    powers = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
    probabilities = powers / powers.sum(1, keepdims=True)
    return _queries(probabilities[:, :-1], boxes, frame, threshold)


def detr_sigmoid(rows: Rows, frame: Frame, threshold: float) -> Candidates:
    """Decode logits [Q, C] of independent classes, and boxes [Q, 4]."""
    logits, boxes = rows
    powers = np.exp(-np.abs(logits.astype(np.float64)))
    return _queries(np.where(logits >= 0, 1, powers) / (1 + powers), boxes, frame, threshold)


def _queries(probabilities: np.ndarray, boxes: np.ndarray, frame: Frame, threshold: float) -> Candidates:
    """Return candidates from probabilities [Q, C] and boxes [Q, 4]: centre and size as parts of the frame."""
    classes, best = _best(probabilities)
    scores = best.astype(np.float32)
    kept = scores >= threshold
    height, width = frame
    sized = boxes[kept].astype(np.float64) * (width, height, width, height)
    return Candidates(_corners(sized), scores[kept], classes[kept])


def cornered(rows: Rows, frame: Frame, threshold: float) -> Candidates:
    """Decode probabilities [A, C], and boxes [A, 4]: corners in pixels."""
    scores, boxes = rows
    classes, best = _best(scores)
    kept = best >= threshold
    return Candidates(boxes[kept].astype(np.float64), best[kept], classes[kept])


def fractions(rows: Rows, frame: Frame, threshold: float) -> Candidates:
    """Decode [Q, 4 + C]: centre and size as parts of the frame, probability of each class."""
    (found,) = rows
    return _queries(found[:, 4:], found[:, :4], frame, threshold)


def fractions_best(rows: Rows, frame: Frame, threshold: float) -> Candidates:
    """Decode [Q, 6]: centre and size as parts of the frame, score, class."""
    (found,) = rows
    found = found[found[:, 4] >= threshold]
    sized = found[:, :4].astype(np.float64) * ([frame.width_px, frame.height_px] * 2)
    return Candidates(_corners(sized), found[:, 4], found[:, 5].astype(np.int64))


def tensorflow(rows: Rows, frame: Frame, threshold: float) -> Candidates:
    """Decode number, boxes [M, 4]: top, left, bottom, right as parts of the frame, scores, classes from 1."""
    boxes, scores, classes = _suppressed_parts(rows)
    kept = (scores >= threshold) & (classes >= 1)
    height, width = frame
    corners = boxes[kept][:, [1, 0, 3, 2]].astype(np.float64) * (width, height, width, height)
    return Candidates(corners, scores[kept], classes[kept].astype(np.int64) - 1)


def suppressed(rows: Rows, frame: Frame, threshold: float) -> Candidates:
    """Decode the result of a network with NMS inside: corners in pixels of its input."""
    boxes, scores, classes = _suppressed_parts(rows)
    kept = (scores >= threshold) & (classes >= 0)
    return Candidates(boxes[kept].astype(np.float64), scores[kept], classes[kept].astype(np.int64))


def _suppressed_parts(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if len(rows) == 4:
        number, boxes, scores, classes = rows
        count = max(0, int(number.reshape(-1)[0]))
        return boxes[:count], scores[:count], classes[:count]
    if len(rows) == 3:
        boxes, scores, classes = rows
        return boxes, scores, classes
    if len(rows) == 2:
        found, classes = rows
        return found[:, :4], found[:, 4], classes
    (found,) = rows
    scores = found[:, 4] if found.shape[1] == 6 else found[:, 4] * found[:, 5]
    return found[:, :4], scores, found[:, -1]


def used_rows(rows: Rows) -> Rows:
    """Return the rows that have a meaning: the others of a network with NMS inside may hold anything."""
    if len(rows) < 4:
        return rows
    count = max(0, int(rows[0].reshape(-1)[0]))
    return [rows[0], *(each[:count] for each in rows[1:])]


def _best(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return index and score of each row's best class, the first of equal ones."""
    classes = scores.argmax(1)
    return classes, np.take_along_axis(scores, classes[:, None], 1)[:, 0]


def _corners(boxes: np.ndarray) -> np.ndarray:
    """Return left, top, right, bottom of boxes [K, 4] with centre and size."""
    half = boxes[:, 2:] / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)

"""Objects detected in an image."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from nereid.base.contract import BOX, LABEL, SCORE
from nereid.client.result_kind import ResultKind, Timings
from nereid.tasks.detect import DETECT


@dataclass(frozen=True, slots=True)
class DetectedObject:
    """One object.

    Attributes:
        label: class name; the class index if the model has no names.
        score: probability, 0..1.
        box: left, top, right and bottom in pixels of the upright image.
    """

    label: str
    score: float
    box: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Detection:
    """The objects in one image, and the model that detected them.

    Attributes:
        objects: best first; empty if nothing was found.
        model, version, variant, reason, request_id, timings, image: as for `Prediction`.
    """

    objects: tuple[DetectedObject, ...]
    model: str
    version: str
    variant: str
    reason: str
    request_id: str
    timings: Timings
    image: str = ""


def _count(result: Any) -> int:
    box, score, label = (result.as_numpy(name) for name in (BOX, SCORE, LABEL))
    is_sound = score.ndim == 2 and label.shape == score.shape and box.shape == (*score.shape, 4)
    return len(score) if is_sound else -1


def _values(result: Any) -> list[tuple[tuple[DetectedObject, ...]]]:
    columns = (result.as_numpy(name) for name in (LABEL, SCORE, BOX))
    return [(tuple(map(_object, *rows)),) for rows in zip(*columns, strict=True)]


def _object(label: bytes, score: np.float32, box: np.ndarray) -> DetectedObject:
    left, top, right, bottom = (float(side) for side in box)
    return DetectedObject(label.decode(), float(score), (left, top, right, bottom))


DETECTIONS = ResultKind(
    *(DETECT.name, DETECT.model, DETECT.outputs, (), _count, _values, Detection), has_equal_shapes=False
)

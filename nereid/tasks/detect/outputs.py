"""Detection: boxes, scores and labels of objects, best first."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nereid.base.contract import BOX, LABEL, SCORE
from nereid.base.task_outputs import Arrays, Comparison, Incomparable, QualitySignals, signals_of_findings
from nereid.tasks.detect import DETECT

# Two boxes with the same label and at least this intersection over union are the same object.
# Source: PASCAL VOC, Everingham et al., 2010.
MATCH_IOU = 0.5
# An object with a lower score may be missing from the other response.
SURE_SCORE = 0.5


class DetectionOutputs:
    """Models that detect objects."""

    outputs = DETECT.outputs

    def compare(self, variant: Arrays, shadow: Arrays) -> Comparison:
        """Compare by the intersection over union of objects with the same label.

        The distance is 1 minus the mean intersection over union; an object without a partner counts as 0.
        Responses are equal if each object with a score of at least `SURE_SCORE` has a partner.
        """
        partners = match(_boxes(variant), _labels(variant), _boxes(shadow), _labels(shadow))
        total = variant[SCORE].size + shadow[SCORE].size
        lone = _sure(variant) - {pair.first for pair in partners}
        lone |= _sure(shadow) - {pair.second for pair in partners}
        overlap = sum(pair.iou for pair in partners)
        return Comparison(1 - 2 * overlap / total if total else 0.0, not lone)

    def signals(self, outputs: Arrays) -> QualitySignals | None:
        """Return the best score of each image with objects, and the number of objects."""
        return signals_of_findings(outputs[SCORE], np.max, "objects")


def iou(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the intersection over union, float64[n, m], of boxes float[n, 4] and float[m, 4].

    A box is left, top, right, bottom. Two boxes without area have an intersection over union of 0.
    """
    left_top = np.maximum(first[:, None, :2], second[None, :, :2])
    right_bottom = np.minimum(first[:, None, 2:], second[None, :, 2:])
    common = (right_bottom - left_top).clip(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clip(min=0).prod(-1) for boxes in (first, second)]
    union = areas[0][:, None] + areas[1] - common
    result: np.ndarray = np.divide(common, union, out=np.zeros_like(common), where=union > 0)
    return result


class Partners(NamedTuple):
    """An object's index in both results, and the intersection over union of its two boxes."""

    first: int
    second: int
    iou: float


def match(
    first: np.ndarray, first_labels: np.ndarray, second: np.ndarray, second_labels: np.ndarray
) -> list[Partners]:
    """Match objects of the same label whose boxes overlap by at least `MATCH_IOU`, largest overlap first.

    Args:
        first, second: boxes, float[n, 4] and float[m, 4].
        first_labels, second_labels: the label of each box, [n] and [m].
    """
    partners: list[Partners] = []
    overlaps = np.where(first_labels[:, None] == second_labels, iou(first, second), 0.0)
    while overlaps.size and overlaps.max() >= MATCH_IOU:
        row, column = (int(index) for index in np.unravel_index(overlaps.argmax(), overlaps.shape))
        partners.append(Partners(row, column, float(overlaps[row, column])))
        overlaps[row, :] = overlaps[:, column] = -1
    return partners


def _boxes(outputs: Arrays) -> np.ndarray:
    boxes = outputs[BOX].reshape(-1, 4).astype(np.float64)
    if not np.isfinite(boxes).all():
        raise Incomparable("expected finite boxes, got NaN or infinity")
    return boxes


def _labels(outputs: Arrays) -> np.ndarray:
    return outputs[LABEL].ravel()


def _sure(outputs: Arrays) -> set[int]:
    return {*np.flatnonzero(outputs[SCORE].ravel() >= SURE_SCORE).tolist()}


def make_outputs(outputs: Sequence[str], class_names: Sequence[str]) -> DetectionOutputs:
    """Return the meaning of a detector's outputs."""
    return DetectionOutputs()

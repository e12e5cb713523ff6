"""Comparison of the objects that two detectors find in one image."""

from typing import NamedTuple

import numpy as np

from nereid.tasks.detect import outputs as detection_outputs
from nereid.tasks.detect.detector import Objects


class Pair(NamedTuple):
    """An object by its place in both results; None where it is missing.

    `difference` is that of the scores, or 1 - IoU of the boxes if that is more; a missing object counts as
    its score.
    """

    places: tuple[int | None, int | None]
    difference: float


def match(one: Objects, other: Objects) -> list[Pair]:
    """Match objects of one class whose boxes overlap, the largest overlap first.

    Args:
        one: objects of the first detector.
        other: those of the second.
    """
    boxes, others = (each.boxes.astype(np.float64) for each in (one, other))
    found = {each.ours: each for each in detection_outputs.match(boxes, one.classes, others, other.classes)}
    pairs = list[Pair]()
    for place, score in enumerate(map(float, one.scores)):
        if partners := found.get(place):
            change = max(1 - partners.iou, abs(score - float(other.scores[partners.theirs])))
            pairs.append(Pair((place, partners.theirs), change))
        else:
            pairs.append(Pair((place, None), score))
    lone = sorted({*range(len(other.scores))} - {each.theirs for each in found.values()})
    return pairs + [Pair((None, each), float(other.scores[each])) for each in lone]

"""How well lines were read: the distance between printed and read text, matched by their boxes."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from nereid.tasks.read.characters import RecognisedLine
from nereid.tasks.read.outputs import edit_distance
from tests.waybills.paper import Printed

# Two boxes show the same text if they share this part of the smaller one.
MIN_SHARE = 0.3
KINDS = ("no number printed", "another number", "field not found", "misread", "not read")


@dataclass(frozen=True, slots=True)
class Passage:
    """Printed and read lines that overlap, as texts without spaces."""

    printed: str
    read: str


def passages(
    printed: Sequence[Printed], read: Sequence[RecognisedLine], ignored: Sequence[np.ndarray] = ()
) -> list[Passage]:
    """Return the groups of lines whose boxes overlap.

    A reader may split a printed line, or read two as one: all lines that overlap directly or over others are
    one group. In a group, lines are joined from the top, and from the left within a row. A read line that
    overlaps only ignored corners [4, 2] is left out; one that overlaps nothing is a group without print.
    """
    boxes = [*(line.box for line in printed), *(line.box for line in read)]
    parent = list(range(len(boxes)))

    def root(node: int) -> int:
        while parent[node] != node:
            node = parent[node]
        return node

    for first in range(len(printed)):
        for second in range(len(printed), len(boxes)):
            if _overlap(boxes[first], boxes[second]):
                parent[root(first)] = root(second)
    groups: dict[int, tuple[list[Printed], list[RecognisedLine]]] = {}
    for index, line in enumerate((*printed, *read)):
        group = groups.setdefault(root(index), ([], []))
        (group[0] if isinstance(line, Printed) else group[1]).append(line)  # type: ignore[arg-type]
    return [
        Passage(_joined(ours), _joined(theirs))
        for ours, theirs in groups.values()
        if ours or not any(_overlap(theirs[0].box, area) for area in ignored)
    ]


def errors(passage: Passage) -> int:
    """Return the inserted, deleted and replaced characters of a passage."""
    return edit_distance(passage.printed, passage.read)


def has_number(number: str, found: Sequence[Passage]) -> bool:
    """Return whether a passage has the number where it was printed, apart from spaces and punctuation."""
    return any(number in _compact(read) for read in _read_of(number, found))


def kind(printed: str | None, answered: str | None, found: Sequence[Passage]) -> str:
    """Return which of `KINDS` is wrong with a field; empty if it is right."""
    if answered == printed:
        return ""
    if printed is None:
        return "no number printed"
    if has_number(printed, found):
        return "another number" if answered else "field not found"
    return "misread" if any(_read_of(printed, found)) else "not read"


def _read_of(number: str, found: Sequence[Passage]) -> list[str]:
    return [passage.read for passage in found if number in _compact(passage.printed)]


def _compact(text: str) -> str:
    return "".join(character for character in text if character.isalnum())


def _overlap(first: np.ndarray, second: np.ndarray) -> bool:
    one, other = (np.ascontiguousarray(box, np.float32) for box in (first, second))
    low, high = np.maximum(one.min(axis=0), other.min(axis=0)), np.minimum(one.max(axis=0), other.max(axis=0))
    if (low >= high).any():
        return False
    shared, _ = cv2.intersectConvexConvex(one, other)
    return bool(shared >= MIN_SHARE * min(cv2.contourArea(one), cv2.contourArea(other)) > 0)


def _joined(lines: Sequence[Printed] | Sequence[RecognisedLine]) -> str:
    """Join lines from the top to the bottom, and from the left to the right within a row."""
    left: list[Any] = sorted(lines, key=lambda line: float(line.box[:, 1].mean()))
    text = ""
    while left:
        middle, height = float(left[0].box[:, 1].mean()), float(np.ptp(left[0].box[[0, 3], 1]))
        row = [line for line in left if abs(float(line.box[:, 1].mean()) - middle) <= height / 2]
        left = [line for line in left if not any(line is other for other in row)]
        text += "".join(
            "".join(unicodedata.normalize("NFKC", line.text).split())
            for line in sorted(row, key=lambda line: float(line.box[:, 0].mean()))
        )
    return text

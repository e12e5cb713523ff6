"""Labels on a page: how near a value is to its own label, to that of another number, or to another word."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from nereid.text.fields.rows import Place, Row
from nereid.text.fields.specification import FieldRule, forms_of, label_expression

MAX_LABELS_FOUND = 200
# How far a value may be from its label, in heights of the text.
REACH_RIGHT, REACH_BELOW = 20.0, 6.0
# A value that is below counts as this much farther than one at the right.
BELOW_PENALTY = 1.0
# Evidence, as logarithm: a value beside a label, what is lost with each height of distance, and what is left
# if another word is between them. A number beside another number's label is the field in 1 of 1,000 cases.
LABEL, PER_HEIGHT, INDIRECT, OTHER = 5.0, 0.5, 1.0, -3.0
# Words that may be anywhere between a label and its value are shorter, such as `no`.
_VALUE = re.compile(r"\d[\d\s-]{3,}\d")
_Corners: TypeAlias = tuple[float, float, float, float, bool]
_WORD = re.compile(r"[^\W\d_]{3,}|[\u3400-\u9fff]")


@dataclass(frozen=True, slots=True)
class Nearness:
    """What the labels say of a value.

    Attributes:
        distance: to the nearest label, in heights of the text; infinite if none is near, or another
            number's label is nearer.
        evidence: as logarithm; negative beside the label of another number.
    """

    distance: float = np.inf
    evidence: float = 0.0

    @property
    def is_labelled(self) -> bool:
        """Whether the value stands near a label."""
        return bool(np.isfinite(self.distance))


class Labels:
    """The labels of a field on a page."""

    def __init__(self, rows: Sequence[Row], rule: FieldRule) -> None:
        """Find the labels; of two that overlap, the longer one counts."""
        self._ends: dict[int, list[int]] = {}
        places: dict[bool, list[_Corners]] = {True: [], False: []}
        self._is_number = any(form.joined for form, _ in forms_of(rule))
        for number, row in enumerate(rows):
            for start, end, is_own in _labels_in(row.text, rule):
                self._ends.setdefault(number, []).append(end)
                places[is_own].append(_corners(row, start, end, self._is_number))
        self._own, self._other = (
            np.array(places[is_own][:MAX_LABELS_FOUND], np.float64).reshape(-1, 5) for is_own in (True, False)
        )
        names = {name for carrier in rule.carriers for name in carrier.labels}
        self._names = label_expression((*sorted(names), *rule.labels)) if names or rule.labels else None

    def nearness(self, row: Row, number: int, start: int, end: int) -> Nearness:
        """Return what the labels say of a part of a row."""
        place = row.place(start, end)
        distance, other = _distance(self._own, place), _distance(self._other, place)
        if other < distance:
            return Nearness(evidence=OTHER)
        if not np.isfinite(distance):
            return Nearness()
        before = row.text[
            max((each for each in self._ends.get(number, ()) if each <= start), default=0) : start
        ]
        is_direct = not self._is_number or not _WORD.search(
            self._names.sub("", before) if self._names else before
        )
        return Nearness(distance, max(LABEL - PER_HEIGHT * distance, INDIRECT) if is_direct else INDIRECT)


def named_carriers(rows: Sequence[Row], rule: FieldRule) -> frozenset[str]:
    """Return the names of the carriers whose words are on a page."""
    return frozenset(
        carrier.name
        for carrier in rule.carriers
        if carrier.labels and any(label_expression(carrier.labels).search(row.text) for row in rows)
    )


def _labels_in(text: str, rule: FieldRule) -> Iterator[tuple[int, int, bool]]:
    """Yield start and end of the labels in a text, and whether they are the field's own."""
    found = [
        (*match.span(), is_own)
        for labels, is_own in ((rule.labels, True), (rule.other_labels, False))
        if labels
        for match in label_expression(labels).finditer(text)
    ]
    taken: list[tuple[int, int]] = []
    for start, end, is_own in sorted(found, key=lambda each: each[0] - each[1]):
        if all(end <= first or last <= start for first, last in taken):
            taken.append((start, end))
            yield start, end, is_own


def _corners(row: Row, start: int, end: int, is_number: bool) -> _Corners:
    """Return the rectangle of a label, and whether its value may be below it: no number is beside it.

    A heading, such as `UPS TRACKING #`, begins where its line does.
    """
    first, last = row.box_ends(start)
    is_heading = not any(map(str.isalnum, row.text[end:last])) and not any(
        map(str.isdigit, row.text[first:start])
    )
    place = row.place(first if is_heading else start, end)
    return place.left, place.top, place.right, place.bottom, not (is_number and _VALUE.search(row.text, end))


def _distance(labels: np.ndarray, place: Place) -> float:
    """Return how far a value is from the nearest label at its left or above it, in heights of the text.

    Args:
        labels: float64[N, 5], see `_corners`.
        place: of the value.
    """
    if not len(labels):
        return np.inf
    left, top, right, bottom, is_open = labels.T
    height = np.maximum(bottom - top, place.height)
    offset = np.abs((top + bottom) / 2 - (place.top + place.bottom) / 2) / height
    gap = (place.left - right) / height
    is_right = (gap >= -0.5) & (gap <= REACH_RIGHT) & (offset <= 0.6)
    below = (place.top - bottom) / height
    shift = np.maximum(np.maximum(left - place.right, place.left - right), 0) / height
    is_below = (below >= -0.5) & (below <= REACH_BELOW) & (shift <= REACH_BELOW)
    is_below &= (place.left >= left - 4 * height) & (is_open > 0)
    distances = np.where(is_right, np.maximum(gap, 0) / 4 + offset, np.inf)
    under = np.maximum(below, 0) + shift / 2 + np.abs(place.left - left) / height / 20 + BELOW_PENALTY
    return float(np.minimum(distances, np.where(is_below, under, np.inf)).min())

"""The fields of a document: candidates for each, ranked by checksum and by the nearest label."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from nereid.text.fields.corrections import Correction, Reading, read_number
from nereid.text.fields.rows import Place, Row, rows_of
from nereid.text.fields.shapes import VALUE
from nereid.text.fields.specification import (
    FieldRule,
    Format,
    Specification,
    expression,
    joined_by_length,
    label_expression,
)
from nereid.text.line import Line

# Groups of characters that one number may have, such as `1Z 999 AA1 01 2345 6784`.
MAX_GROUPS = 12
# Bounds of one field; further ones are left out in reading order.
MAX_CANDIDATES, MAX_LABELS_FOUND = 2000, 200
# How far a value may be from its label, in heights of the text.
REACH_RIGHT, REACH_BELOW = 20.0, 6.0
# A value that is below counts as this much farther than one at the right.
BELOW_PENALTY = 1.0
# Row, start and end of a candidate.
Span = tuple[int, int, int]
_GROUP = re.compile(r"[0-9A-Za-z]+")
# A full stop may be dirt, or that of a decimal: it separates only what needs no label.
_STOPS = re.compile(r"[.·]")
_SEPARATORS = re.compile(r"[\s\-\u2010-\u2015\u2212().·]*")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A possible value of a field.

    Attributes:
        reading: the value, and what is known of it.
        confidence: of the line; the least one if several boxes have the value.
        box: corners float32[4, 2] of the value in pixels of the upright image.
        distance: to the nearest label, in heights of the text; infinite if none is near.
        needs_label: whether the format counts only near a label.
    """

    reading: Reading
    confidence: float
    box: np.ndarray
    distance: float = np.inf
    needs_label: bool = False

    @property
    def claim(self) -> tuple[bool, float]:
        """Sort key of fields that want the same text."""
        return self.reading.valid is not True, self.distance

    @property
    def rank(self) -> tuple[bool, float, bool, float]:
        """Sort key, the best first."""
        valid = self.reading.valid
        return valid is not True, self.distance, valid is False, -self.confidence


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a document; `value` and `box` are None if it was not found, and `confidence` is 0."""

    name: str
    value: str | None = None
    confidence: float = 0.0
    box: np.ndarray | None = None
    valid: bool | None = None
    corrected: tuple[Correction, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the JSON object of the field, as docs/contract.md has it."""
        return {
            "name": self.name,
            "value": self.value,
            "confidence": round(self.confidence, 4),
            "box": None if self.box is None else np.round(self.box.astype(float), 1).tolist(),
            "valid": self.valid,
            "corrected": [
                {"position": each.position, "from": each.before, "to": each.after} for each in self.corrected
            ],
        }


def find_fields(lines: Sequence[Line], specification: Specification) -> list[Field]:
    """Return each field of the specification, in its order, with its best candidate.

    Time is bounded: at most `MAX_LINES` lines count, and patterns are bounded by `count_ways`.
    """
    return [
        Field(name)
        if not found
        else Field(
            name,
            found[0].reading.value,
            found[0].confidence,
            found[0].box,
            found[0].reading.valid,
            found[0].reading.corrections,
        )
        for name, found in find_candidates(lines, specification).items()
    ]


def missing_fields(fields: Sequence[Field], specification: Specification) -> list[str]:
    """Return the names of the required fields that were not found, or whose checksum does not hold."""
    complete = {each.name for each in fields if each.value is not None and each.valid is not False}
    return [rule.name for rule in specification.fields if rule.required and rule.name not in complete]


def find_candidates(lines: Sequence[Line], specification: Specification) -> dict[str, list[Candidate]]:
    """Return the candidates of each field by its name, the best first.

    A text that fits several fields belongs to the one whose checksum holds, else to the nearest label.
    """
    rows = rows_of(lines)
    found = {rule.name: _candidates(rows, rule) for rule in specification.fields}
    best: dict[Span, tuple[bool, float]] = {}
    for candidates in found.values():
        for key, candidate in candidates.items():
            best[key] = min(candidate.claim, best.get(key, candidate.claim))
    return {
        name: sorted(
            (each for key, each in candidates.items() if each.claim == best[key]), key=lambda each: each.rank
        )
        for name, candidates in found.items()
    }


def _candidates(rows: Sequence[Row], rule: FieldRule) -> Mapping[Span, Candidate]:
    """Return the candidates of a field by row, start and end."""
    labels = _label_places(rows, rule)
    found: dict[Span, Candidate] = {}
    readings = (
        (number, row, each) for number, row in enumerate(rows) for each in _readings(row, rule.formats)
    )
    for number, row, (start, end, reading, form) in islice(readings, MAX_CANDIDATES):
        distance = _distance(labels, row.place(start, end))
        if not form.needs_label or np.isfinite(distance):
            confidence, box = row.confidence(start, end), row.box(start, end)
            found[number, start, end] = Candidate(reading, confidence, box, distance, form.needs_label)
    return _without_parts(found)


def _without_parts(found: Mapping[Span, Candidate]) -> Mapping[Span, Candidate]:
    """Leave out what is a part of a longer candidate, unless only the part has a checksum that holds.

    A part of a format that needs a label is always left out: its checksum may hold by chance.
    """
    kept: dict[Span, Candidate] = {}
    ends: dict[tuple[int, bool], int] = {}
    for number, start, end in sorted(found, key=lambda span: (span[0], span[1], -span[2])):
        candidate = found[number, start, end]
        is_valid = candidate.reading.valid is True and not candidate.needs_label
        if end > ends.get((number, True), 0) and (is_valid or end > ends.get((number, False), 0)):
            kept[number, start, end] = candidate
            ends[number, is_valid] = end
    return kept


def _readings(row: Row, formats: tuple[Format, ...]) -> Iterator[tuple[int, int, Reading, Format]]:
    """Yield start, end, reading and format of every value in a row."""
    for form in formats:
        if not form.joined:
            for match in expression(form).finditer(row.text):
                start, end = match.span(VALUE if VALUE in match.re.groupindex else 0)
                if end > start:
                    yield start, end, Reading(row.text[start:end], None), form
    by_length = joined_by_length(formats)
    longest = max(by_length, default=0)
    groups = list(_GROUP.finditer(row.text))
    for first, group in enumerate(groups):
        text, has_stop = "", False
        for last in range(first, min(first + MAX_GROUPS, len(groups))):
            gap = row.text[groups[last - 1].end() : groups[last].start()] if last > first else ""
            text += groups[last][0]
            if len(text) > longest or not _SEPARATORS.fullmatch(gap):
                break
            has_stop = has_stop or bool(_STOPS.search(gap))
            forms = by_length.get(len(text), ())
            if has_stop and forms:
                forms = tuple(form for form in forms if not form.needs_label)
            read = read_number(text, forms) if forms else None
            if read and not (read[1].needs_label and _goes_on(row, groups, first, last)):
                yield group.start(), groups[last].end(), *read


def _goes_on(row: Row, groups: Sequence[re.Match[str]], first: int, last: int) -> bool:
    """Return whether groups with digits follow or precede in the same box: then it is a part of a number."""
    for inner, outer in ((first, first - 1), (last, last + 1)):
        if 0 <= outer < len(groups) and re.search("[0-9]", groups[outer][0]):
            begin, end = (
                min(groups[inner].end(), groups[outer].end()),
                max(groups[inner].start(), groups[outer].start()),
            )
            if _SEPARATORS.fullmatch(row.text[begin:end]) and row.is_one_box(begin, end):
                return True
    return False


def _label_places(rows: Sequence[Row], rule: FieldRule) -> np.ndarray:
    """Return the places of a field's labels, float64[N, 4]: left, top, right, bottom."""
    found: list[Place] = []
    if rule.labels:
        for row in rows:
            matches = label_expression(rule.labels).finditer(row.text)
            found += [row.place(*match.span()) for match in matches]
    places = [(each.left, each.top, each.right, each.bottom) for each in found[:MAX_LABELS_FOUND]]
    return np.array(places, np.float64).reshape(-1, 4)


def _distance(labels: np.ndarray, place: Place) -> float:
    """Return how far a value is from the nearest label at its left or above it, in heights of the text."""
    if not len(labels):
        return np.inf
    left, top, right, bottom = labels.T
    height = np.maximum(bottom - top, place.height)
    offset = np.abs((top + bottom) / 2 - (place.top + place.bottom) / 2) / height
    gap = (place.left - right) / height
    is_right = (gap >= -0.5) & (gap <= REACH_RIGHT) & (offset <= 0.6)
    below = (place.top - bottom) / height
    shift = np.maximum(np.maximum(left - place.right, place.left - right), 0) / height
    is_below = (below >= -0.5) & (below <= REACH_BELOW) & (shift <= REACH_BELOW)
    is_below &= place.left >= left - 4 * height
    distances = np.where(is_right, np.maximum(gap, 0) / 4 + offset, np.inf)
    under = np.maximum(below, 0) + shift / 2 + np.abs(place.left - left) / height / 20 + BELOW_PENALTY
    return float(np.minimum(distances, np.where(is_below, under, np.inf)).min())

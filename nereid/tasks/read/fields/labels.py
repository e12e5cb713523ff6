"""Labels on a page: how near a value is to its own label, another number's label, or another word."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TypeAlias
from unicodedata import normalize

import numpy as np

from nereid.tasks.read.fields.rows import Row, TextRectangle
from nereid.tasks.read.fields.specification import FieldRule, carrier_formats, label_expression
from nereid.tasks.read.outputs import edit_distance

MAX_LABELS_FOUND = 200
# Maximum distance of a value from its label, in text heights; any to the right if no other text is between.
REACH_RIGHT, REACH_BELOW = 20.0, 6.0
# Maximum offset of a value to the right of its label, in text heights.
MAX_OFFSET = 0.6
# A value below its label counts as this much farther away than one to the right.
BELOW_PENALTY = 1.0
# Evidence as a logarithm: for a value beside a label, lost per text height of distance, and left if another
# word is between them. A number beside another number's label is the field in 1 of 1,000 cases.
LABEL_EVIDENCE = 5.0
EVIDENCE_LOST_PER_HEIGHT = 0.8
INDIRECT_EVIDENCE = 1.0
OTHER_LABEL_EVIDENCE = -3.0
_Corners: TypeAlias = tuple[float, float, float, float, bool, float]
# Labels by their number of letters, then by these letters.
_ByLength: TypeAlias = Mapping[int, Mapping[str, str]]
_VALUE = re.compile(r"\d[\d\s-]{3,}\d")
# Words allowed between a label and its value are shorter, such as `no`.
_WORD = re.compile(r"[^\W\d_]{3,}|[\u3400-\u9fff]")
_ADDRESS = re.compile(r"//|\.\w")
_CHINESE = re.compile(r"[\u3400-\u9fff]")
MAX_SHORT = 2
_LETTERS = re.compile(r"[^\W\d_]+")
# Minimum letters and maximum words of a label that is recognised with one wrong letter, which leaves this
# many letters intact at one end.
MIN_LETTERS = 8
MAX_WORDS = 3
MIN_INTACT_LETTERS = 4
# Kinds of labels: the field's own, possibly its own, and other numbers'.
OWN, CUT, OTHERS = "own", "cut", "others"


@dataclass(frozen=True, slots=True)
class Nearness:
    """What the labels say about a value.

    Attributes:
        distance: to the nearest label, in text heights; infinite if none is near, or another number's
            label is nearer.
        evidence: as a logarithm; negative beside another number's label.
        may_be_cut: whether the label may be the end of a longer one whose beginning was not read.
    """

    distance: float = np.inf
    evidence: float = 0.0
    may_be_cut: bool = False

    @property
    def is_labelled(self) -> bool:
        """Whether the value is near a label."""
        return bool(np.isfinite(self.distance))


class FieldLabels:
    """A field's labels on a page.

    Attributes:
        named: names of the carriers whose words are on the page.
        has_own: whether a label of the field is on the page.
    """

    def __init__(self, rows: Sequence[Row], rule: FieldRule) -> None:
        self._ends: dict[int, list[int]] = {}
        self._is_number = any(form.joined for form, _ in carrier_formats(rule))
        rectangles: dict[str, list[_Corners]] = {OWN: [], CUT: [], OTHERS: []}
        boxes = np.array([row.rectangle(0, len(row.text)) for row in rows]).reshape(-1, 4)
        long = _long_labels((*rule.labels, *rule.other_labels))
        for number, row in enumerate(rows):
            for start, end, kind in _labels_of(row, rule, long):
                self._ends.setdefault(number, []).append(end)
                rectangles[kind].append(_corners(row, start, end, self._is_number, boxes))
        self._own, self._cut, self._other = (
            np.array(corners[:MAX_LABELS_FOUND], np.float64).reshape(-1, 6) for corners in rectangles.values()
        )
        self.has_own = bool(len(self._own) or len(self._cut))
        carriers = {
            carrier.name: label_expression(carrier.labels) for carrier in rule.carriers if carrier.labels
        }
        self.named = frozenset(
            name for name, pattern in carriers.items() if any(pattern.search(row.text) for row in rows)
        )
        self._names = [carriers[name] for name in self.named]

    def nearness(self, row: Row, number: int, start: int, end: int) -> Nearness:
        """Return what the labels say about part of a row."""
        rectangle = row.rectangle(start, end)
        clear, cut = _distance(self._own, rectangle), _distance(self._cut, rectangle)
        distance, other = min(clear, cut), _distance(self._other, rectangle)
        if other < distance:
            return Nearness(evidence=OTHER_LABEL_EVIDENCE)
        if not np.isfinite(distance):
            return Nearness()
        ends = (label_end for label_end in self._ends.get(number, ()) if label_end <= start)
        before = row.text[max(ends, default=0) : start]
        for name in self._names:
            before = name.sub("", before)
        is_direct = not self._is_number or not _WORD.search(before)
        evidence = INDIRECT_EVIDENCE
        if is_direct:
            evidence = max(evidence, LABEL_EVIDENCE - EVIDENCE_LOST_PER_HEIGHT * distance)
        return Nearness(distance, evidence, may_be_cut=cut < clear)


def _labels_of(row: Row, rule: FieldRule, long: _ByLength) -> Iterator[tuple[int, int, str]]:
    """Yield the start, end and kind of a row's labels. A box without one may start with a misread one."""
    labels = list(_labels_in(row.text, rule))
    yield from labels
    for piece in row.pieces:
        if not any(start < piece.end and piece.start < end for start, end, _ in labels):
            end, label = _misread(piece.text, long)
            if end:
                yield piece.start, piece.start + end, OWN if label in rule.labels else OTHERS


def _misread(text: str, labels: _ByLength) -> tuple[int, str]:
    """Return where a label with one wrong letter ends that starts a text, and the label; else 0 and ""."""
    words = list(islice(_LETTERS.finditer(text), MAX_WORDS))
    for count in range(len(words), 0, -1):
        read = "".join(word[0] for word in words[:count]).lower()
        for length in range(len(read) - 1, len(read) + 2):
            for letters, label in labels.get(length, {}).items():
                is_alike = (
                    letters[:MIN_INTACT_LETTERS] == read[:MIN_INTACT_LETTERS]
                    or letters[-MIN_INTACT_LETTERS:] == read[-MIN_INTACT_LETTERS:]
                )
                if is_alike and edit_distance(letters, read) <= 1:
                    return words[count - 1].end(), label
    return 0, ""


@cache
def _long_labels(labels: tuple[str, ...]) -> _ByLength:
    """Return the labels that are long enough to be recognised with one wrong letter."""
    by_length: dict[int, dict[str, str]] = {}
    for label in labels:
        letters = "".join(_LETTERS.findall(normalize("NFKC", label))).lower()
        if len(letters) >= MIN_LETTERS:
            by_length.setdefault(len(letters), {})[letters] = label
    return by_length


def _labels_in(text: str, rule: FieldRule) -> Iterator[tuple[int, int, str]]:
    """Yield the start, end and kind of the labels in a text.

    A short Chinese label at the end of another word, such as 业务单号, belongs to another number. If no word
    precedes it, the word may not have been read.
    """
    names = tuple(label for carrier in rule.carriers for label in carrier.labels)
    if labels := (*rule.labels, *rule.other_labels):
        for match in label_expression(labels).finditer(text):
            is_own = bool(rule.labels and label_expression(rule.labels).fullmatch(match[0]))
            before = text[: match.start()]
            if before.endswith("/") and _ADDRESS.search(before.rpartition(" ")[2]):  # of a web page
                continue
            is_short = len(match[0]) <= MAX_SHORT and _CHINESE.match(match[0])
            kind = OWN if is_own else OTHERS
            if is_own and is_short and rule.other_labels and not before.endswith(names):
                kind = OTHERS if _CHINESE.match(before[-1:]) else CUT
            yield *match.span(), kind


def _corners(row: Row, start: int, end: int, is_number: bool, boxes: np.ndarray) -> _Corners:
    """Return a label's rectangle, whether its value may be below, and where the next text at its right is.

    Its value may be below if no number is beside it. `boxes` float64[N, 4] are the rectangles of the rows.

    A heading, such as `UPS TRACKING #`, starts where its line does.
    """
    first, last = row.box_ends(start)
    is_last = not any(map(str.isalnum, row.text[end:last]))
    is_heading = is_last and not any(map(str.isdigit, row.text[first:start]))
    rectangle = row.rectangle(first if is_heading else start, end)
    is_open = not (is_number and _VALUE.search(row.text, end))
    return *rectangle, is_open, _next_left(rectangle, boxes) if last == len(row.text) and is_last else -np.inf


def _next_left(label: TextRectangle, boxes: np.ndarray) -> float:
    """Return the left end of the next text on a label's line; infinite if there is none."""
    left, top, _, bottom = boxes.T
    offset = np.abs((top + bottom) / 2 - (label.top + label.bottom) / 2)
    is_beside = (offset <= MAX_OFFSET * np.maximum(bottom - top, label.height)) & (left > label.right)
    return float(left[is_beside].min(initial=np.inf))


def _distance(labels: np.ndarray, rectangle: TextRectangle) -> float:
    """Return the distance of a value from the nearest label to its left or above it, in text heights.

    Args:
        labels: float64[N, 6], see `_corners`.
    """
    if not len(labels):
        return np.inf
    left, top, right, bottom, is_open, next_left = labels.T
    height = np.maximum(bottom - top, rectangle.height)
    offset = np.abs((top + bottom) / 2 - (rectangle.top + rectangle.bottom) / 2) / height
    gap = (rectangle.left - right) / height
    is_near = (gap <= REACH_RIGHT) | (rectangle.left <= next_left)
    is_right = (gap >= -0.5) & is_near & (offset <= MAX_OFFSET)
    below = (rectangle.top - bottom) / height
    shift = np.maximum(np.maximum(left - rectangle.right, rectangle.left - right), 0) / height
    is_below = (below >= -0.5) & (below <= REACH_BELOW) & (shift <= REACH_BELOW)
    is_below &= (rectangle.left >= left - 4 * height) & (is_open > 0)
    distances = np.where(is_right, np.maximum(gap, 0) / 4 + offset, np.inf)
    under = np.maximum(below, 0) + shift / 2 + np.abs(rectangle.left - left) / height / 20 + BELOW_PENALTY
    return float(np.minimum(distances, np.where(is_below, under, np.inf)).min())

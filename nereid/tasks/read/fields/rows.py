"""Rows of neighbouring boxes, each as one text with a position for every character."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from nereid.base.contract import MAX_LINES
from nereid.tasks.read.characters import RecognisedLine

# Longer lines are truncated: fields are short, and this bounds the time for patterns.
MAX_LINE_CHARACTERS = 256
# A box continues a row if the gap, the offset and the height ratio are small, in text heights.
MAX_GAP, MAX_OFFSET, MAX_HEIGHT_RATIO = 1.5, 0.5, 1.8
# How far the next box may begin before the end of this one.
MAX_OVERLAP = 0.8
# Digits this near to a row, below or at its right, may belong to its last number.
NEXT_LINE, NEXT_BOX = 1.5, 6.0
# A line of digits, perhaps with a letter or two behind them, and digits at the end of a line.
_DIGITS, _LAST_DIGITS = re.compile(r"\d[\d\s-]*[A-Z]{0,2}"), re.compile(r"\d[\d\s-]*[\s.·-]*$")
# A number this long may be printed alone and within a longer one, as FedEx does.
MIN_CONTAINED = 8


class TextRectangle(NamedTuple):
    """A rectangle along the page's text, in pixels; the page is rotated so that its text is level."""

    left: float
    top: float
    right: float
    bottom: float

    @property
    def height(self) -> float:
        """Height of the text, at least one pixel."""
        return max(self.bottom - self.top, 1.0)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a row: corners in the image [4, 2] and on the level page, position in the text, and its text.

    `others` has another possible character, or a space, for each of the text.
    """

    box: np.ndarray
    level: np.ndarray
    confidence: float
    start: int
    text: str
    others: str

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    def shares(self, start: int, end: int) -> tuple[float, float]:
        """Return where part of the row begins and ends in this box, as fractions 0..1 of its width."""
        widths = [
            0,
            *accumulate(2 if unicodedata.east_asian_width(glyph) in "WF" else 1 for glyph in self.text),
        ]
        first, last = max(start - self.start, 0), min(end, self.end) - self.start
        return widths[first] / max(widths[-1], 1), widths[last] / max(widths[-1], 1)


@dataclass(frozen=True, slots=True)
class Row:
    """Boxes from left to right, joined by spaces in `text`."""

    text: str
    pieces: tuple[_Piece, ...]

    @property
    def others(self) -> str:
        """Another possible character for each of the text; a space if there is none."""
        return " ".join(piece.others for piece in self.pieces)

    def followed_by(self, other: "Row") -> "Row":
        """Return this row and the one in which its last number goes on, as one."""
        moved = (replace(piece, start=piece.start + len(self.text) + 1) for piece in other.pieces)
        return Row(f"{self.text} {other.text}", (*self.pieces, *moved))

    def confidence(self, start: int, end: int) -> float:
        """Return the lowest confidence of the boxes of a part."""
        return min(piece.confidence for piece in self._touched(start, end))

    def is_one_box(self, start: int, end: int) -> bool:
        """Return whether no box begins inside a part."""
        return not any(start < piece.start <= end for piece in self.pieces)

    def box_ends(self, start: int) -> tuple[int, int]:
        """Return the start and end, in the text, of the box containing a character."""
        box = next(piece for piece in self.pieces if start < piece.end)
        return box.start, box.end

    def box(self, start: int, end: int) -> np.ndarray:
        """Return the corners float32[4, 2] of a part in the image."""
        return self._corners(start, end, "box")

    def rectangle(self, start: int, end: int) -> TextRectangle:
        """Return the rectangle of a part on the level page."""
        corners = self._corners(start, end, "level")
        return TextRectangle(*map(float, (*corners.min(axis=0), *corners.max(axis=0))))

    def _touched(self, start: int, end: int) -> list[_Piece]:
        return [piece for piece in self.pieces if piece.start < end and start < piece.end]

    def _corners(self, start: int, end: int, kind: str) -> np.ndarray:
        touched = self._touched(start, end)
        first, last = touched[0], touched[-1]
        left, right = first.shares(start, end)[0], last.shares(start, end)[1]
        begin, stop = getattr(first, kind), getattr(last, kind)
        top_left = begin[0] + (begin[1] - begin[0]) * left
        bottom_left = begin[3] + (begin[2] - begin[3]) * left
        top_right = stop[0] + (stop[1] - stop[0]) * right
        bottom_right = stop[3] + (stop[2] - stop[3]) * right
        return np.array([top_left, top_right, bottom_right, bottom_left], np.float32)


def rows_of(lines: Sequence[RecognisedLine]) -> list[Row]:
    """Return the rows of at most `MAX_LINES` lines; any more are left out.

    Text is normalised to NFKC, which turns full-width characters into ASCII. Lines without text or with a
    non-finite box are left out.
    """
    texts = [_normalised(line.text) for line in lines[:MAX_LINES]]
    used = [
        (line, text)
        for line, text in zip(lines, texts, strict=False)
        if text and np.shape(line.box) == (4, 2) and np.isfinite(line.box).all()
    ]
    if not used:
        return []
    boxes = np.array([line.box for line, _ in used], np.float64)
    level = _levelled(boxes)
    following = _following(level)
    heads = sorted(set(range(len(used))) - set(following.values()))
    rows = []
    for head in heads:
        pieces: list[_Piece] = []
        number: int | None = head
        while number is not None:
            line, text = used[number]
            start = pieces[-1].end + 1 if pieces else 0
            others = line.others if len(line.others) == len(line.text) == len(text) else " " * len(text)
            pieces.append(_Piece(boxes[number], level[number], float(line.confidence), start, text, others))
            number = following.get(number)
        rows.append(Row(" ".join(piece.text for piece in pieces), tuple(pieces)))
    return rows


def continued(rows: Sequence[Row]) -> np.ndarray:
    """Return, for each row, whether its last number may go on in each other row, bool[N, N].

    The other row is of the same size, right below or farther to the right, and has digits only, or up to two
    letters behind them.
    """
    rectangles = np.array([row.rectangle(0, len(row.text)) for row in rows]).reshape(-1, 4)
    left, top, right, bottom = rectangles.T
    height, middle = np.maximum(bottom - top, 1.0), (top + bottom) / 2
    lower, higher = np.minimum.outer(height, height), np.maximum.outer(height, height)
    below, gap = (top - bottom[:, None]) / lower, (left - right[:, None]) / lower
    is_below = (below >= -MAX_OFFSET) & (below <= NEXT_LINE) & (left < right[:, None])
    is_below &= left >= left[:, None] - lower
    is_right = (gap >= 0) & (gap <= NEXT_BOX) & (np.abs(middle - middle[:, None]) <= MAX_OFFSET * lower)
    tails = [_LAST_DIGITS.search(row.text) for row in rows]
    heads = [_DIGITS.fullmatch(row.text) for row in rows]
    goes_on: np.ndarray = (is_below | is_right) & (higher <= MAX_HEIGHT_RATIO * lower)
    goes_on &= np.array([head is not None for head in heads], bool)
    goes_on &= np.array([tail is not None for tail in tails], bool)[:, None]
    for first, second in np.argwhere(goes_on).tolist():
        short, long = sorted((_digits(tails[first]), _digits(heads[second])), key=len)
        goes_on[first, second] = len(short) < MIN_CONTAINED or short not in long
    return goes_on


def _digits(match: re.Match[str] | None) -> str:
    return re.sub(r"\D", "", match[0]) if match else ""


def row_of_barcode(text: str, box: np.ndarray) -> Row:
    """Return a barcode's text with its corners [4, 2] as a row."""
    corners = np.asarray(box, np.float64)
    return Row(text := _normalised(text), (_Piece(corners, corners, 1.0, 0, text, " " * len(text)),))


def _normalised(text: str) -> str:
    text = unicodedata.normalize("NFKC", text[:MAX_LINE_CHARACTERS])[:MAX_LINE_CHARACTERS]
    return re.sub(r"[\s\x00-\x1f]+", " ", text).strip()


def _levelled(boxes: np.ndarray) -> np.ndarray:
    """Rotate boxes [N, 4, 2] so that most of the text is level."""
    along = (boxes[:, 1] - boxes[:, 0] + boxes[:, 2] - boxes[:, 3]).sum(axis=0)
    angle = np.arctan2(along[1], along[0])
    cosine, sine = np.cos(angle), np.sin(angle)
    turned: np.ndarray = boxes @ np.array([[cosine, -sine], [sine, cosine]])
    return turned


def _following(level: np.ndarray) -> dict[int, int]:
    """Return the box to the right of each box [N, 4, 2] in its row; a box follows at most one other."""
    left, right = level[:, [0, 3]].mean(axis=1), level[:, [1, 2]].mean(axis=1)
    height = np.maximum(level[:, [2, 3], 1].mean(axis=1) - level[:, [0, 1], 1].mean(axis=1), 1.0)
    lower, higher = np.minimum.outer(height, height), np.maximum.outer(height, height)
    gap = (left[None, :, 0] - right[:, None, 0]) / lower
    offset = np.abs(left[None, :, 1] - right[:, None, 1]) / lower
    fits = (gap <= MAX_GAP) & (gap >= -MAX_OVERLAP) & (offset <= MAX_OFFSET)
    fits &= higher <= MAX_HEIGHT_RATIO * lower
    # Ordering along the row makes cycles impossible.
    middle = level[:, :, 0].mean(axis=1)
    fits &= middle[None, :] > middle[:, None]
    cost = np.where(fits, np.abs(gap) + offset, np.inf)
    followers: dict[int, int] = {}
    taken: set[int] = set()
    candidates = np.argwhere(np.isfinite(cost))
    for number, other in candidates[np.argsort(cost[tuple(candidates.T)], kind="stable")].tolist():
        if number not in followers and other not in taken:
            followers[number] = other
            taken.add(other)
    return followers

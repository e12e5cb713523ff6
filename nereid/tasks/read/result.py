"""Text read from an image, and the fields of a document."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, TypeAlias

import msgspec
import numpy as np

from nereid.base.contract import BARCODE_OUTPUTS, BOX, CONFIDENCE, FIELD, PAGE_OUTPUTS, TEXT
from nereid.client.result_kind import ResultKind, Timings
from nereid.tasks.read import READ

# Corners (x, y) in pixels of the upright image, clockwise from the top left of the text.
Corners: TypeAlias = tuple[tuple[float, float], ...]
# An application identifier and its value. Source: GS1 General Specifications 3.2.
_ELEMENT = re.compile(r"\((\d{2,4})\)(.*?)(?=\(\d{2,4}\)|$)")


@dataclass(frozen=True, slots=True)
class TextLine:
    """One line of text.

    Attributes:
        text: its characters.
        confidence: mean probability of the characters, 0..1.
        box: four corners (x, y) in pixels of the upright image, clockwise from the text's top left.
        page: page number, from 1.
    """

    text: str
    confidence: float
    box: Corners
    page: int = 1


@dataclass(frozen=True, slots=True)
class Correction:
    """A character that a checksum proved wrong; `position` is its index in the value, from 0."""

    position: int
    read: str
    value: str


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a document.

    Attributes:
        name: field name in the document's definition.
        value: the field's text; None if the field was not found.
        confidence: probability of its characters, 0..1.
        box: four corners, as for a line; None if the field was not found.
        valid: whether the checksum matches; None for a field without one.
        corrected: characters corrected by the checksum.
        proof: evidence for the value: `label+checksum`, `checksum`, `label` or `format only`, or with bars
            `barcode+text+checksum`; None if the field was not found.
        carrier: the number's carrier; None if unknown.
        certain: whether the value is proven, and no other is about as likely.
        candidates: all about equally likely values, this one first; empty if it has no rival.
        page: number of the page that was searched, from 1.
    """

    name: str
    value: str | None
    confidence: float
    box: Corners | None
    valid: bool | None
    corrected: tuple[Correction, ...] = ()
    proof: str | None = None
    carrier: str | None = None
    certain: bool = False
    candidates: tuple[str, ...] = ()
    page: int = 1


@dataclass(frozen=True, slots=True)
class Barcode:
    """One barcode.

    Attributes:
        text: the content. GS1 application identifiers are in parentheses, as printed below the bars.
        symbology: such as `Code 128`, `QR Code` or `GS1-128`.
        box: four corners, as for a line, clockwise from the symbol's top left.
        page: page number, from 1.
    """

    text: str
    symbology: str
    box: Corners
    page: int = 1

    @property
    def elements(self) -> dict[str, str]:
        """GS1 values by application identifier, such as `00`; empty for other barcodes."""
        is_gs1 = self.symbology.startswith(("GS1", "DataBar"))
        return dict(_ELEMENT.findall(self.text)) if is_gs1 else {}


@dataclass(frozen=True, slots=True)
class PageSize:
    """The size of a page in pixels, to which its boxes refer."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The text of one image or document, and the model that read it.

    Attributes:
        lines: page by page in reading order; empty if there is no text.
        fields: the fields of each page; empty for a model that reads only lines.
        barcodes: from top to bottom; empty for a model that reads only text.
        model, version, variant, reason, request_id, timings, image: as for `Prediction`.
        pages: sizes of the pages read; empty for a model that reads only images.
    """

    lines: tuple[TextLine, ...]
    fields: tuple[Field, ...]
    barcodes: tuple[Barcode, ...]
    model: str
    version: str
    variant: str
    reason: str
    request_id: str
    timings: Timings
    image: str = ""
    pages: tuple[PageSize, ...] = ()


def _reading(pages: tuple[PageSize, ...], *values: Any) -> Reading:
    return replace(Reading(*values), pages=pages)


def _count(result: Any) -> int:
    text, confidence, box = (result.as_numpy(name) for name in (TEXT, CONFIDENCE, BOX))
    is_sound = text.ndim == 2 and confidence.shape == text.shape and box.shape == (*text.shape, 4, 2)
    return len(text) if is_sound else -1


def _values(result: Any) -> list[tuple[tuple[Any, ...], ...]]:
    """Return each file's pages, lines, fields and barcodes; empty where the model lacks an output."""
    names = (TEXT, CONFIDENCE, BOX, FIELD, *BARCODE_OUTPUTS, *PAGE_OUTPUTS)
    columns = [result.as_numpy(name) for name in names]
    count = len(columns[0])
    files = zip(*([()] * count if column is None else column for column in columns), strict=True)
    return [_file(*columns_of_file) for columns_of_file in files]


def _file(
    texts: Sequence[bytes],
    confidences: Sequence[np.float32],
    boxes: Sequence[np.ndarray],
    fields: Sequence[bytes],
    codes: Sequence[bytes],
    symbologies: Sequence[bytes],
    code_boxes: Sequence[np.ndarray],
    line_pages: Iterable[np.int32],
    code_pages: Iterable[np.int32],
    sizes: Sequence[np.ndarray],
) -> tuple[tuple[Any, ...], ...]:
    if not len(sizes):  # a model that reads only images
        line_pages = code_pages = repeat(np.int32(1))
    return (
        tuple(PageSize(int(width), int(height)) for width, height in sizes),
        tuple(map(_line, texts, confidences, boxes, line_pages)),
        tuple(_field(json.loads(entry)) for entry in fields),
        tuple(map(_barcode, codes, symbologies, code_boxes, code_pages)),
    )


def _line(text: bytes, confidence: np.float32, box: np.ndarray, page: np.int32) -> TextLine:
    return TextLine(text.decode(), float(confidence), _corners(box.tolist()), int(page))


def _barcode(text: bytes, symbology: bytes, box: np.ndarray, page: np.int32) -> Barcode:
    return Barcode(text.decode(), symbology.decode(), _corners(box.tolist()), int(page))


def _field(entry: Mapping[str, Any]) -> Field:
    """Return a field; servers of older releases do not return its last attributes."""
    swaps = [
        {"position": swap["position"], "read": swap["from"], "value": swap["to"]}
        for swap in entry["corrected"]
    ]
    return msgspec.convert({**entry, "corrected": swaps}, Field)


def _corners(box: list[list[float]]) -> Corners:
    return tuple((float(x), float(y)) for x, y in box)


READINGS = ResultKind(
    *(READ.name, READ.model, READ.outputs, (FIELD, *BARCODE_OUTPUTS, *PAGE_OUTPUTS), _count, _values),
    _reading,
    has_equal_shapes=False,
)

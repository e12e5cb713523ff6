"""A recogniser's characters, the decoding of its outputs to text, and the record of a line."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nereid.base.errors import InvalidConfig
from nereid.base.units import split_lines


@dataclass(frozen=True, slots=True)
class RecognisedLine:
    """One line of text.

    Attributes:
        text: its characters.
        confidence: mean probability of the characters, 0..1.
        box: corners float32[4, 2] (x, y) in pixels of the upright image, clockwise from the text's top left.
        page: page number, from 1.
        others: for each character the second most probable one, or a space if that is not probable.
    """

    text: str
    confidence: float
    box: np.ndarray
    page: int = 1
    others: str = ""


BLANK = 0
# A second character below this probability is not considered.
MIN_OTHER = 0.05
# Metadata key of the dictionary in PP-OCR's ONNX files: one character per line.
KEY = "character"
# ONNX protobuf field numbers: ModelProto.metadata_props; StringStringEntryProto.key and .value.
METADATA, ENTRY_KEY, ENTRY_VALUE = 14, 1, 2
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MAX_VARINT_BYTES = 10


class Characters:
    """A network's characters by class; the first is the blank, the last a space."""

    def __init__(self, characters: list[str]) -> None:
        self._characters = np.array(["", *characters, " "], object)

    def __len__(self) -> int:
        return len(self._characters)

    @classmethod
    def from_file(cls, path: Path) -> "Characters":
        """Read the dictionary of an ONNX file.

        Raises:
            InvalidConfig: the file has none.
        """
        try:
            text = read_metadata(path).get(KEY)
        except (OSError, ValueError, IndexError) as error:
            raise InvalidConfig(f"cannot read the characters of '{path}': {error}") from None
        if not text:
            raise InvalidConfig(
                f"'{path}': expected the metadata '{KEY}' with one character per line, got none"
            )
        return cls(split_lines(text))

    def decode(
        self,
        index: np.ndarray,
        probability: np.ndarray,
        next_index: np.ndarray | None = None,
        next_probability: np.ndarray | None = None,
    ) -> list[tuple[str, float, str]]:
        """Return the text, confidence and other characters of each line, without repeated classes and blanks.

        Args:
            index: best class of each step, int[N, T].
            probability: its probability, float32[N, T].
            next_index, next_probability: the second best class, or None if the network does not return it.

        Source: Graves et al. 2006, Connectionist Temporal Classification, best path decoding.
        """
        kept = index != BLANK
        kept[:, 1:] &= index[:, 1:] != index[:, :-1]
        counts = kept.sum(axis=1)
        sums = np.where(kept, probability, 0).sum(axis=1, dtype=np.float64)
        means = sums / np.maximum(counts, 1)
        texts = ("".join(self._characters[row[keep]]) for row, keep in zip(index, kept, strict=True))
        others = [""] * len(index)
        if next_index is not None and next_probability is not None:
            is_known = (next_probability >= MIN_OTHER) & (next_index > BLANK) & (next_index < len(self))
            named = np.where(is_known, next_index, len(self) - 1)
            others = ["".join(self._characters[row[keep]]) for row, keep in zip(named, kept, strict=True)]
        return [*zip(texts, means.tolist(), others, strict=True)]


def read_metadata(path: Path) -> dict[str, str]:
    """Read an ONNX file's metadata without the ONNX package; the network itself is skipped.

    Raises:
        ValueError, IndexError: the file is not a protobuf message.
    """
    metadata = {}
    with path.open("rb") as file:
        while file.peek(1):
            field_number, kind = _tag(file)
            if field_number == METADATA and kind == BYTES:
                entry = _entry(file.read(_varint(file)))
                metadata[entry.get(ENTRY_KEY, b"").decode()] = entry.get(ENTRY_VALUE, b"").decode()
            else:
                _skip(file, kind)
    return metadata


def _entry(message: bytes) -> dict[int, bytes]:
    file, fields = io.BytesIO(message), {}
    while file.tell() < len(message):
        field_number, _ = _tag(file)
        fields[field_number] = file.read(_varint(file))
    return fields


def _tag(file: BinaryIO) -> tuple[int, int]:
    key = _varint(file)
    return key >> 3, key & 7


def _varint(file: BinaryIO) -> int:
    value = 0
    for position in range(MAX_VARINT_BYTES):
        byte = file.read(1)[0]
        value |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            return value
    raise ValueError(f"expected a number of at most {MAX_VARINT_BYTES} bytes, got more")


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == VARINT:
        _varint(file)
    elif kind in (FIXED64, FIXED32):
        file.seek(8 if kind == FIXED64 else 4, 1)
    elif kind == BYTES:
        size = _varint(file)
        file.seek(size, 1)
    else:
        raise ValueError(f"expected a protobuf message, got a field of kind {kind}")

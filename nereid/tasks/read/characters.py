"""A recogniser's characters, the decoding of its outputs to text, and the record of a line."""

from dataclasses import dataclass
from pathlib import Path

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
# The part of ONNX's schema that has the metadata. Source: onnx/onnx.proto.
SCHEMA = {"Model": {"metadata": (14, "Entry*")}, "Entry": {"key": (1, ""), "value": (2, "")}}


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
        from google.protobuf.message import DecodeError

        from nereid.vision.inference.shared_weights import message_class

        try:
            model = message_class(SCHEMA).FromString(path.read_bytes())
            text = {entry.key: entry.value for entry in model.metadata}.get(KEY)
        except (OSError, ValueError, DecodeError) as error:
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

"""One line of text that was read from an image."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Line:
    """One line of text.

    Attributes:
        text: its characters.
        confidence: mean probability of the characters, 0..1.
        box: corners float32[4, 2] (x, y) in pixels of the upright image, clockwise from the text's top left.
    """

    text: str
    confidence: float
    box: np.ndarray

"""Whether lines of text are upright or upside down."""

from collections.abc import Callable, Sequence

import cv2
import numpy as np

from nereid.text.crops import LINE_HEIGHT_PX
from nereid.text.lines_batch import stacked

# Width of the network's input. Source: PP-OCR mobile v2.0, direction classifier (48 x 192).
WIDTH_PX = 192
MAX_ROWS = 16
# Source: PP-OCR, its inference settings (cls_thresh).
MIN_PROBABILITY = 0.9

Network = Callable[[np.ndarray], np.ndarray]


def upside_down(network: Network, lines: Sequence[np.ndarray]) -> np.ndarray:
    """Return for each line uint8[48, W, 3] the probability that it is upside down, float32[N]."""
    found = np.zeros(len(lines), np.float32)
    for start in range(0, len(lines), MAX_ROWS):
        rows = [_squeezed(line) for line in lines[start : start + MAX_ROWS]]
        found[start : start + len(rows)] = network(stacked(rows, WIDTH_PX))[:, 1]
    return found


def _squeezed(line: np.ndarray) -> np.ndarray:
    if line.shape[1] <= WIDTH_PX:
        return line
    return cv2.resize(line, (WIDTH_PX, LINE_HEIGHT_PX), interpolation=cv2.INTER_LINEAR)

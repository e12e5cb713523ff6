"""Which way text runs: whether lines are upside down, and by how many quarter turns a page lies."""

from collections.abc import Callable, Sequence

import cv2
import numpy as np

from nereid.tasks.read.crops import LINE_HEIGHT_PX
from nereid.tasks.read.lines_batch import stacked

# Width of the network's input. Source: PP-OCR mobile v2.0, direction classifier (48 x 192).
WIDTH_PX = 192
MAX_ROWS = 16
# Source: PP-OCR, its inference settings (cls_thresh).
MIN_PROBABILITY = 0.9
# Part of the text, by its length, that must run in a direction.
MAJORITY = 0.6

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


def page_turn(boxes: np.ndarray) -> int:
    """Return by how many quarter turns, counter-clockwise, a page becomes upright: 0 to 3.

    Args:
        boxes: float32[N, 4, 2], the corners clockwise from each text's top left.
    """
    if not len(boxes):
        return 0
    along = boxes[:, 1] - boxes[:, 0]
    # In pixels y points down: a positive angle is a clockwise turn.
    quarters = np.rint(np.arctan2(along[:, 1], along[:, 0]) / (np.pi / 2)).astype(int) % 4
    lengths = np.bincount(quarters, np.linalg.norm(along, axis=1), 4)
    return int(lengths.argmax()) if lengths.max() >= MAJORITY * lengths.sum() else 0


def turned(pixels: np.ndarray, quarters: int) -> np.ndarray:
    """Return pixels [H, W, 3] turned counter-clockwise."""
    return np.ascontiguousarray(np.rot90(pixels, quarters))


def positions_before(points: np.ndarray, size_wh: tuple[int, int], quarters: int) -> np.ndarray:
    """Convert positions [..., 2] on a turned page to those before the turn.

    Args:
        size_wh: width and height before the turn.
        quarters: counter-clockwise quarter turns, 0 to 3.
    """
    width, height = size_wh
    x, y = points[..., 0], points[..., 1]
    found = {
        0: (x, y),
        1: (width - 1 - y, x),
        2: (width - 1 - x, height - 1 - y),
        3: (y, height - 1 - x),
    }[quarters]
    return np.stack(found, axis=-1)

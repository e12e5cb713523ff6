"""Quarter turns of a whole page, by the directions of its lines."""

import numpy as np

# Part of the text, by its length, that must run in a direction.
MAJORITY = 0.6


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

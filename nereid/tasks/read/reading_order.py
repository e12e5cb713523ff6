"""The order in which a reader meets the lines of a page."""

from itertools import pairwise

import numpy as np

# Lines are in one row if their centres differ by less than this part of the lower one's height.
ROW_OVERLAP = 0.5


def reading_order(boxes: np.ndarray) -> np.ndarray:
    """Return the places of boxes [N, 4, 2] from top to bottom, and from left to right within a row.

    The corners of each box are clockwise from its text's top left, so "top" is that of most of the text.
    """
    if not len(boxes):
        return np.zeros(0, int)
    along = boxes[:, 1] - boxes[:, 0]
    length = np.linalg.norm(along, axis=1)
    angle = _main_angle(np.arctan2(along[:, 1], along[:, 0]), length)
    cosine, sine = np.cos(angle), np.sin(angle)
    centers = boxes.mean(axis=1) @ np.array([[cosine, -sine], [sine, cosine]], np.float32)
    heights = np.linalg.norm(boxes[:, 3] - boxes[:, 0], axis=1)
    rows = _rows(centers[:, 1], heights)
    order: np.ndarray = np.lexsort((centers[:, 0], rows))
    return order


def _main_angle(angles: np.ndarray, weights: np.ndarray) -> float:
    """Return the median angle of the quarter turn that most of the text has."""
    quarters = np.rint(angles / (np.pi / 2)).astype(int) % 4
    main = int(np.bincount(quarters, weights, 4).argmax())
    inside = np.angle(np.exp(1j * (angles[quarters == main] - main * np.pi / 2)))
    return main * np.pi / 2 + float(np.median(inside))


def _rows(y: np.ndarray, heights: np.ndarray) -> np.ndarray:
    """Return the number of each line's row."""
    rows = np.zeros(len(y), int)
    order = np.argsort(y, kind="stable")
    first = order[0]
    for before, place in pairwise(order):
        is_new = y[place] - y[first] >= ROW_OVERLAP * min(heights[place], heights[first])
        first = place if is_new else first
        rows[place] = rows[before] + is_new
    return rows

"""Non-maximum suppression: of boxes of one class that overlap, the one with the best score stays."""

import numpy as np

from nereid.tasks.detect.outputs import iou


def suppress(boxes: np.ndarray, classes: np.ndarray, iou_threshold: float, limit: int) -> np.ndarray:
    """Return the indices of the boxes that stay, int64[at most `limit`], in their order.

    One pass per kept box over all that are left: the time grows with `limit`, not with the square of K.

    Args:
        boxes: float64[K, 4], the best score first.
        classes: int64[K]; boxes of different classes do not suppress each other.
        iou_threshold: a box goes if its overlap with a kept one is larger.
        limit: most boxes to keep.
    """
    left, kept = np.arange(len(boxes)), list[int]()
    while len(left) and len(kept) < limit:
        best, left = left[0], left[1:]
        kept.append(int(best))
        overlaps = iou(boxes[best][None], boxes[left])[0]
        is_same = (overlaps > iou_threshold) & (classes[left] == classes[best])
        left = left[~is_same]
    return np.array(kept, np.int64)

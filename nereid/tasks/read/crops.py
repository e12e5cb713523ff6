"""Rectified images of single lines of text."""

import cv2
import numpy as np

# Height of the recogniser's input. Source: PP-OCRv6 small, its inference settings (48 x 320).
LINE_HEIGHT_PX = 48
# A line that is longer is squeezed.
MAX_LINE_WIDTH_PX = 3200
# A box that is so much higher than wide has text that runs downwards or upwards.
TALL_RATIO = 1.5


def along_text(boxes: np.ndarray) -> np.ndarray:
    """Turn the corners of tall boxes [N, 4, 2], so that the first side of every box runs along its text."""
    width, height = side_lengths(boxes)
    return np.where((height >= TALL_RATIO * width)[:, None, None], np.roll(boxes, -1, axis=1), boxes)


def side_lengths(boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths along the text and across it, float32[N] each, of boxes [N, 4, 2]."""
    sides = np.linalg.norm(boxes - np.roll(boxes, -1, axis=1), axis=2)
    return np.maximum(sides[:, 0], sides[:, 2]), np.maximum(sides[:, 1], sides[:, 3])


def cut(pixels: np.ndarray, box: np.ndarray) -> np.ndarray:
    """Return the line inside a box [4, 2] as uint8[48, W, 3].

    Args:
        pixels: uint8[H, W, 3].
        box: corners in pixels, the first side along the text.
    """
    along, across = side_lengths(box[None])
    width, height = max(1, int(along[0])), max(1, int(across[0]))
    corners = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    matrix = cv2.getPerspectiveTransform(box.astype(np.float32), corners)
    line = cv2.warpPerspective(
        pixels, matrix, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE
    )
    resized = min(MAX_LINE_WIDTH_PX, -(-LINE_HEIGHT_PX * width // height))
    return cv2.resize(line, (resized, LINE_HEIGHT_PX), interpolation=cv2.INTER_LINEAR)


def turned_around(line: np.ndarray) -> np.ndarray:
    """Return a line rotated by 180 degrees."""
    return cv2.rotate(line, cv2.ROTATE_180)

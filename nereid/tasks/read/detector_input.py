"""The input of the network that finds text."""

import cv2
import numpy as np

from nereid.tasks.read.upright import MAX_SIDE_PX

# Source: PP-OCRv6 small, its inference settings (limit_side_len 736, limit_type min).
MIN_SIDE_PX = 736
# The network halves each side five times.
STRIDE_PX = 32
# A strip gets a margin along its longer sides up to this ratio: the network misses text that fills its input.
MAX_RATIO = 8
# (pixel - 127.5) / 127.5, for each channel.
LEVEL = 127.5


class DetectorInput:
    """One image as the detector sees it.

    Attributes:
        tensor: float32[1, 3, H, W], BGR, -1..1.
        scale_xy: converts positions in the tensor to those of the pixels.
        offset_xy: is then subtracted: the margin of a strip, in pixels.
    """

    __slots__ = ("offset_xy", "scale_xy", "tensor")

    def __init__(self, pixels: np.ndarray) -> None:
        """Resize and normalise pixels uint8[H, W, 3], RGB."""
        padded, self.offset_xy = _with_margin(pixels)
        height, width = padded.shape[:2]
        size_wh = network_size(width, height)
        self.scale_xy = np.array([width / size_wh[0], height / size_wh[1]], np.float32)
        if size_wh != (width, height):
            padded = cv2.resize(padded, size_wh, interpolation=cv2.INTER_LINEAR)
        self.tensor = normalised(padded)

    def positions(self, points: np.ndarray) -> np.ndarray:
        """Convert points float32[..., 2] of the tensor to those of the pixels."""
        found: np.ndarray = points * self.scale_xy - self.offset_xy
        return found


def network_size(width: int, height: int) -> tuple[int, int]:
    """Return the width and height at which an image is searched.

    The shorter side gets `MIN_SIDE_PX` at least, unless the longer one would exceed `MAX_SIDE_PX`.
    """
    factor = min(max(1.0, MIN_SIDE_PX / min(width, height)), MAX_SIDE_PX / max(width, height))
    width, height = (max(1, round(side * factor / STRIDE_PX)) * STRIDE_PX for side in (width, height))
    return width, height


def normalised(pixels: np.ndarray) -> np.ndarray:
    """Return RGB pixels uint8[H, W, 3] as float32[1, 3, H, W], BGR, -1..1: the networks learned on BGR."""
    tensor: np.ndarray = cv2.dnn.blobFromImage(pixels, 1 / LEVEL, mean=(LEVEL,) * 3, swapRB=True)
    return tensor


def _with_margin(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    height, width = pixels.shape[:2]
    top, left = (
        max(0, -(-other // MAX_RATIO) - side) // 2 for side, other in ((height, width), (width, height))
    )
    if top or left:
        pixels = cv2.copyMakeBorder(pixels, top, top, left, left, cv2.BORDER_REPLICATE)
    return pixels, np.array([left, top], np.float32)

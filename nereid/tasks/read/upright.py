"""Decoding of image files to the upright pixels that text is read from."""

import math

import cv2
import numpy as np

from nereid.tasks.read.stages import StageTimes
from nereid.vision.imaging.decode import SHRINKS, Buffers, EncodedImage, Limits, open_image
from nereid.vision.imaging.transform import TURNS, Turn

BACKGROUND = (255, 255, 255)
# Text is searched on at most this many pixels per side, and read from an image of at most twice as many.
MAX_SIDE_PX = 2000
MAX_KEPT_PX = 2 * MAX_SIDE_PX


class UprightImage:
    """Upright pixels uint8[H, W, 3], RGB, perhaps smaller than the original image.

    `scale_xy` converts positions in `pixels` to those of the upright original, whose size is `size_wh`.
    """

    __slots__ = ("pixels", "scale_xy", "size_wh")

    def __init__(self, pixels: np.ndarray, size_wh: tuple[int, int]) -> None:
        height, width = pixels.shape[:2]
        self.pixels, self.size_wh = pixels, size_wh
        self.scale_xy = np.array([size_wh[0] / width, size_wh[1] / height], np.float32)


class UprightDecoder:
    """Decodes untrusted files, one at a time, within `limits`; for one thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._buffers = limits, Buffers()

    def __call__(self, encoded: bytes, times: StageTimes) -> UprightImage:
        """Decode one file; a large one is reduced.

        Raises:
            InvalidImage: the file is not an image, is damaged, or exceeds the limits.
        """
        image = open_image(encoded, self._limits)
        times.opened(image)
        stored = image.pixels(_shrink(image), BACKGROUND, self._buffers)
        turn = TURNS[image.orientation]
        size_wh = image.size_wh[::-1] if turn.is_transposed else image.size_wh
        return UprightImage(_turned(_reduced(stored), turn), size_wh)


def _shrink(image: EncodedImage) -> int:
    allowed = max(image.size_wh) // MAX_SIDE_PX
    return max((each for each in SHRINKS if each <= min(image.max_shrink, allowed)), default=1)


def _reduced(pixels: np.ndarray) -> np.ndarray:
    height, width = pixels.shape[:2]
    factor = MAX_KEPT_PX / max(height, width)
    if factor >= 1:
        return pixels
    size_wh = max(1, math.floor(width * factor)), max(1, math.floor(height * factor))
    return cv2.resize(pixels, size_wh, interpolation=cv2.INTER_AREA)


def _turned(pixels: np.ndarray, turn: Turn) -> np.ndarray:
    if turn.is_transposed:
        pixels = cv2.transpose(pixels)
    if turn.flips_rows or turn.flips_columns:
        # OpenCV's codes: 0 flips rows, 1 columns, -1 both.
        pixels = cv2.flip(pixels, -1 if turn.flips_rows and turn.flips_columns else int(turn.flips_columns))
    return pixels

"""Signals of the images that a network receives, for comparison with a reference.

Only a few pixels are measured, because the cost is part of every request (docs/drift.md#measured).
"""

import math
from collections.abc import Callable, Mapping

import numpy as np

from nereid.vision.imaging.decode import EncodedImage
from nereid.vision.imaging.image_times import ProbeImage
from nereid.vision.imaging.transform import Transform

# Target number of pixels measured per side, each with its right neighbour; always fewer than twice this.
SAMPLES = 32
# Weights of red, green and blue. Source: ITU-R BT.601, 2.5.1.
LUMA = (0.299, 0.587, 0.114)
Sink = Callable[[Mapping[str, float]], object]


class ImageMeter:
    """Measures images and sends their signals to `sink`.

    Args:
        transform: the transformation that produces the network's inputs.
        sink: called with the signals of each image, by name.
    """

    def __init__(self, transform: Transform, sink: Sink) -> None:
        self._transform, self._sink = transform, sink
        height, width = transform.height_px, transform.width_px
        self._steps = max(1, height // SAMPLES), max(1, width // SAMPLES)
        order = (0, 1, 2) if transform.color_order == "RGB" else (2, 1, 0)
        self._red, self._blue = order.index(0), order.index(2)
        self._weights = [LUMA[color] * transform.std[channel] / 255 for channel, color in enumerate(order)]
        self._offset = sum(LUMA[color] * transform.mean[channel] / 255 for channel, color in enumerate(order))

    def __call__(self, encoded: bytes, image: EncodedImage, row: np.ndarray) -> None:
        """Measure one image unless it is a probe; a failure here never fails the request.

        Args:
            image: its header.
            row: the network's input for it, in the layout and datatype of the transformation.
        """
        try:
            if not isinstance(encoded, ProbeImage):
                turn = self._transform.turn(image.orientation)
                size_wh = image.size_wh[::-1] if turn.is_transposed else image.size_wh
                self._sink(self.pixel_signals(row) | size_signals(size_wh))
        except Exception:  # the image itself is good, so its request must be answered
            return

    def pixel_signals(self, row: np.ndarray) -> dict[str, float]:
        """Return the brightness, contrast, sharpness and warmth of a network's input.

        All refer to pixels before normalisation, scaled to 0..1. Source of the luma: ITU-R BT.601.
        """
        transform = self._transform
        planes = row if transform.layout == "NCHW" else row.transpose(2, 0, 1)
        step_y, step_x = self._steps
        # The last column has no right neighbour.
        left = planes[:, ::step_y, :-1:step_x].astype(np.float32)
        right = planes[:, ::step_y, 1::step_x].astype(np.float32)
        luma, next_luma = self._luma(left).ravel(), self._luma(right).ravel()
        count = luma.size
        mean = float(luma.sum()) / count
        luma_around = luma - mean
        variance = float(luma_around @ luma_around) / count
        difference = float(np.abs(luma - next_luma).sum()) / count
        red, blue = (self._mean(left, channel) for channel in (self._red, self._blue))
        return {
            "brightness": max(0.0, mean + self._offset),
            "contrast": math.sqrt(variance),
            "sharpness": difference,
            "warmth": red / (red + blue) if red + blue > 0 else 0.5,
        }

    def _luma(self, planes: np.ndarray) -> np.ndarray:
        """Return the luma of float32[3, H, W] in units of 0..1, without the offset from the mean."""
        first, second, third = self._weights
        luma: np.ndarray = planes[0] * first
        luma += planes[1] * second
        luma += planes[2] * third
        return luma

    def _mean(self, planes: np.ndarray, channel: int) -> float:
        level = float(planes[channel].sum()) / planes[channel].size
        return float(max(0.0, level * self._transform.std[channel] + self._transform.mean[channel]))


def size_signals(size_wh: tuple[int, int]) -> dict[str, float]:
    """Return the aspect ratio (width / height) and the megapixels of an upright image of this size."""
    width, height = size_wh
    return {"aspect": width / height, "megapixels": width * height / 1e6}

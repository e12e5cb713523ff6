"""The lines of text in an image, each upright and on its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import cv2
import numpy as np

from nereid.base.contract import MAX_LINES
from nereid.base.errors import InvalidImage
from nereid.tasks.read.boxes import find_boxes, reading_order
from nereid.tasks.read.line_images import (
    LINE_HEIGHT_PX,
    DetectorInput,
    UprightDecoder,
    UprightImage,
    along_text,
    batches,
    cut,
    stacked,
    turned_around,
)
from nereid.tasks.read.stages import StageTimes
from nereid.vision.imaging.decode import ImageLimits

Network = Callable[[np.ndarray], np.ndarray]
# Width of the network's input. Source: PP-OCR mobile v2.0, direction classifier (48 x 192).
WIDTH_PX = 192
MAX_ROWS = 16
# Source: PP-OCR, its inference settings (cls_thresh).
MIN_PROBABILITY = 0.9
# Fraction of the text, by length, that must run in one direction.
MAJORITY = 0.6


def upside_down(network: Network, lines: Sequence[np.ndarray]) -> np.ndarray:
    """Return the probability that each line uint8[48, W, 3] is upside down, float32[N]."""
    probabilities = np.zeros(len(lines), np.float32)
    for start in range(0, len(lines), MAX_ROWS):
        rows = [_squeezed(line) for line in lines[start : start + MAX_ROWS]]
        probabilities[start : start + len(rows)] = network(stacked(rows, WIDTH_PX))[:, 1]
    return probabilities


def _squeezed(line: np.ndarray) -> np.ndarray:
    if line.shape[1] <= WIDTH_PX:
        return line
    return cv2.resize(line, (WIDTH_PX, LINE_HEIGHT_PX), interpolation=cv2.INTER_LINEAR)


def page_quarters(boxes: np.ndarray) -> int:
    """Return the counter-clockwise quarter turns that make a page upright, 0 to 3.

    Args:
        boxes: float32[N, 4, 2], the corners clockwise from each text's top left.
    """
    if not len(boxes):
        return 0
    along = boxes[:, 1] - boxes[:, 0]
    # In pixels, y points down, so a positive angle is a clockwise turn.
    quarters = np.rint(np.arctan2(along[:, 1], along[:, 0]) / (np.pi / 2)).astype(int) % 4
    lengths = np.bincount(quarters, np.linalg.norm(along, axis=1), 4)
    return int(lengths.argmax()) if lengths.max() >= MAJORITY * lengths.sum() else 0


def rotate(pixels: np.ndarray, quarters: int) -> np.ndarray:
    """Return pixels [H, W, 3] rotated counter-clockwise."""
    return np.ascontiguousarray(np.rot90(pixels, quarters))


def positions_before(points: np.ndarray, size_wh: tuple[int, int], quarters: int) -> np.ndarray:
    """Convert positions [..., 2] on a rotated page to positions before the rotation.

    Args:
        size_wh: width and height before the rotation.
        quarters: counter-clockwise quarter turns, 0 to 3.
    """
    width, height = size_wh
    x, y = points[..., 0], points[..., 1]
    rotated = (x, y), (width - 1 - y, x), (width - 1 - x, height - 1 - y), (y, height - 1 - x)
    return np.stack(rotated[quarters], axis=-1)


# This many lines may all be mistaken for upside down.
MAX_MISTAKEN_LINES = 3


@dataclass(frozen=True, slots=True)
class FoundLines:
    """The lines of an image.

    Attributes:
        boxes: float32[N, 4, 2], line corners in original pixels, the first side along the text.
        crops: uint8[48, W, 3] each.
        others: maps a line's index to the index of its rotated copy, whose text may be better.
    """

    boxes: np.ndarray
    crops: list[np.ndarray]
    others: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.crops) - len(self.others)

    def with_others(self, lines: Sequence[int]) -> "FoundLines":
        """Return these lines, and rotated copies of some, by their indices."""
        return FoundLines(
            np.concatenate([self.boxes, np.roll(self.boxes[[*lines]], 2, axis=1)]),
            self.crops + [turned_around(self.crops[line]) for line in lines],
            self.others | {line: index for index, line in enumerate(lines, len(self.crops))},
        )


def find_lines(
    image: UprightImage, detect: Network, direction: Network, times: StageTimes, max_lines: int = MAX_LINES
) -> FoundLines:
    """Return the lines of an image; a sideways or upside-down page is rotated first.

    A line that still seems upside down may be a mistake of the network, so it is returned both ways,
    as are all lines of a page that was rotated on the evidence of a few lines.

    Args:
        detect: a network, [1, 3, H, W] to probabilities of text float32[1, 1, H, W].
        direction: a network, [N, 3, 48, 192] to probabilities float32[N, 2] of upright and upside down.
        times: receives the times of the stages.
        max_lines: maximum number of lines; each costs time.

    Raises:
        InvalidImage: there are more lines.
    """
    pixels = image.pixels
    boxes, crops, flipped = _turned_lines(pixels, detect, direction, times, max_lines)
    if quarters := page_quarters(boxes):
        boxes, crops, flipped = _turned_lines(rotate(pixels, quarters), detect, direction, times, max_lines)
        height, width = pixels.shape[:2]
        boxes = positions_before(boxes, (width, height), quarters)
        if len(crops) <= MAX_MISTAKEN_LINES:
            flipped = np.arange(len(crops))
    return FoundLines(boxes * image.scale_xy, crops).with_others(flipped.tolist())


def cut_lines(encoded: bytes, detect: Network, direction: Network, limits: ImageLimits) -> list[np.ndarray]:
    """Return a file's lines in reading order, float32[1, 3, 48, W] each, as recogniser input.

    A line that seems upside down is returned only rotated.

    Raises:
        InvalidImage: the file is not an image, is damaged, or exceeds the limits.
    """
    times = StageTimes()
    image_lines = find_lines(UprightDecoder(limits)(encoded, times), detect, direction, times)
    lines = [image_lines.crops[index] for index in reading_order(image_lines.boxes[: len(image_lines)])]
    return [stacked([line], width) for line in lines for _, width in batches([line.shape[1]])]


def _turned_lines(
    pixels: np.ndarray, detect: Network, direction: Network, times: StageTimes, max_lines: int
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    with times.stage("detect"):
        prepared = DetectorInput(pixels)
        probabilities = detect(prepared.tensor)[0, 0]
    with times.stage("boxes"):
        regions = find_boxes(probabilities)
        if len(regions) > max_lines:
            raise InvalidImage(
                f"expected at most {max_lines} lines of text in an image, got {len(regions)} or more; "
                "fix: send parts of it"
            )
        height, width = pixels.shape[:2]
        boxes = along_text(prepared.positions(regions))
        boxes = np.clip(boxes, 0, np.array([width - 1, height - 1], np.float32))
    with times.stage("crops"):
        crops = [cut(pixels, box) for box in boxes]
    with times.stage("direction"):
        flips = upside_down(direction, crops) > MIN_PROBABILITY
        crops = [turned_around(crop) if flip else crop for crop, flip in zip(crops, flips, strict=True)]
        boxes = np.where(flips[:, None, None], np.roll(boxes, -2, axis=1), boxes)
    return boxes, crops, np.flatnonzero(flips)

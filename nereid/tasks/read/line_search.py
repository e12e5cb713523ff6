"""The lines of text on an image, each upright and on its own."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from nereid.base.contract import MAX_LINES
from nereid.base.serving_errors import InvalidImage
from nereid.tasks.read.boxes import find_boxes
from nereid.tasks.read.crops import along_text, cut, turned_around
from nereid.tasks.read.detector_input import DetectorInput
from nereid.tasks.read.direction import MIN_PROBABILITY, page_turn, positions_before, turned, upside_down
from nereid.tasks.read.lines_batch import batches, stacked
from nereid.tasks.read.reading_order import reading_order
from nereid.tasks.read.stages import StageTimes
from nereid.tasks.read.upright import UprightDecoder, UprightImage
from nereid.vision.imaging.decode import Limits

# As many lines may all be mistaken for upside down.
FEW = 3
Network = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class FoundLines:
    """The lines of an image.

    Attributes:
        boxes: float32[N, 4, 2], their corners in original pixels, the first side along the text.
        crops: uint8[48, W, 3] each.
        others: by the place of a line, the place of the same line turned around: its text may be better.
    """

    boxes: np.ndarray = field(default_factory=lambda: np.zeros((0, 4, 2), np.float32))
    crops: list[np.ndarray] = field(default_factory=list)
    others: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self.crops) - len(self.others)


def find_lines(
    image: UprightImage,
    detect: Network,
    direction: Network,
    times: StageTimes,
    max_lines: int = MAX_LINES,
) -> FoundLines:
    """Return the lines of an image; a page on its side or its head is turned first.

    A line that is then still upside down may be a mistake of the network, so it is returned both ways. So are
    those of a page that was turned for a few lines.

    Args:
        image: the page.
        detect: a network, [1, 3, H, W] to probabilities of text float32[1, 1, H, W].
        direction: a network, [N, 3, 48, 192] to probabilities float32[N, 2] of upright and upside down.
        times: receives those of the stages.
        max_lines: how many there may be; each costs time.

    Raises:
        InvalidImage: there are more.
    """
    pixels = image.pixels
    boxes, crops, flipped = _turned_lines(pixels, detect, direction, times, max_lines)
    if quarters := page_turn(boxes):
        boxes, crops, flipped = _turned_lines(turned(pixels, quarters), detect, direction, times, max_lines)
        height, width = pixels.shape[:2]
        boxes = positions_before(boxes, (width, height), quarters)
        if len(crops) <= FEW:
            flipped = np.arange(len(crops))
    return FoundLines(
        np.concatenate([boxes, np.roll(boxes[flipped], 2, axis=1)]) * image.scale_xy,
        crops + [turned_around(crops[line]) for line in flipped],
        {int(line): place for place, line in enumerate(flipped, len(crops))},
    )


def cut_lines(encoded: bytes, detect: Network, direction: Network, limits: Limits) -> list[np.ndarray]:
    """Return the lines of a file in reading order, float32[1, 3, 48, W] each, as a recogniser takes them.

    A line that seems upside down is returned in that direction only.

    Raises:
        InvalidImage: the file is not an image, is damaged, or exceeds the limits.
    """
    times = StageTimes()
    found = find_lines(UprightDecoder(limits)(encoded, times), detect, direction, times)
    lines = [found.crops[place] for place in reading_order(found.boxes[: len(found)])]
    return [stacked([line], width) for line in lines for _, width in batches([line.shape[1]])]


def _turned_lines(
    pixels: np.ndarray, detect: Network, direction: Network, times: StageTimes, max_lines: int
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """Return boxes and crops of all lines, and the places of those that were upside down."""
    with times.stage("detect"):
        prepared = DetectorInput(pixels)
        probabilities = detect(prepared.tensor)[0, 0]
    with times.stage("boxes"):
        found = find_boxes(probabilities)
        if len(found) > max_lines:
            raise InvalidImage(
                f"expected at most {max_lines} lines of text in an image, got {len(found)} or more; "
                "fix: send parts of it"
            )
        height, width = pixels.shape[:2]
        boxes = along_text(prepared.positions(found))
        boxes = np.clip(boxes, 0, np.array([width - 1, height - 1], np.float32))
    with times.stage("crops"):
        crops = [cut(pixels, box) for box in boxes]
    with times.stage("direction"):
        flips = upside_down(direction, crops) > MIN_PROBABILITY
        crops = [turned_around(crop) if flip else crop for crop, flip in zip(crops, flips, strict=True)]
        boxes = np.where(flips[:, None, None], np.roll(boxes, -2, axis=1), boxes)
    return boxes, crops, np.flatnonzero(flips)

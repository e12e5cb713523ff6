"""Network inputs: a page for detection, and rectified lines of text in batches."""

import math
from collections.abc import Generator, Iterator, Sequence

import cv2
import numpy as np

from nereid.base.errors import InvalidImage
from nereid.base.units import format_bytes
from nereid.tasks.read import pdf
from nereid.tasks.read.stages import StageTimes
from nereid.vision.imaging.decode import SHRINKS, Buffers, EncodedImage, ImageLimits, open_image, pages_of
from nereid.vision.imaging.formats.image_header import is_pdf
from nereid.vision.imaging.transform import TURNS, Turn

BACKGROUND = (255, 255, 255)
# Text is detected on at most this many pixels per side, and read from an image of at most twice as many.
MAX_SIDE_PX = 2000
MAX_KEPT_PX = 2 * MAX_SIDE_PX


class UprightImage:
    """Upright pixels uint8[H, W, 3], RGB, possibly smaller than the original image.

    `scale_xy` converts positions in `pixels` to the upright original, whose size is `size_wh`.
    """

    __slots__ = ("pixels", "scale_xy", "size_wh")

    def __init__(self, pixels: np.ndarray, size_wh: tuple[int, int]) -> None:
        height, width = pixels.shape[:2]
        self.pixels, self.size_wh = pixels, size_wh
        self.scale_xy = np.array([size_wh[0] / width, size_wh[1] / height], np.float32)


class UprightDecoder:
    """Decodes untrusted files one at a time within `limits`; for use on one thread.

    Without `max_pages`, it opens only images, and only the first page of each.
    """

    def __init__(self, limits: ImageLimits, max_pages: int = 0) -> None:
        self._limits, self._buffers, self._max_pages = limits, Buffers(), max_pages

    def pages(self, encoded: bytes, times: StageTimes) -> Generator[UprightImage, None, None]:
        """Yield a file's pages, decoded on demand; large ones are reduced.

        Raises:
            InvalidImage: the file is neither an image nor a PDF, is damaged, or exceeds the limits.
        """
        if self._max_pages and is_pdf(encoded):
            if len(encoded) > self._limits.max_image_bytes:
                limit, size = format_bytes(self._limits.max_image_bytes), format_bytes(len(encoded))
                raise InvalidImage(f"expected at most {limit}, got {size}")
            for pixels in pdf.pages(encoded, self._max_pages):
                height, width = pixels.shape[:2]
                times.record_header("PDF", (width, height))
                yield UprightImage(pixels, (width, height))
            return
        for frame in pages_of(encoded, self._max_pages) if self._max_pages else [0]:
            yield self(encoded, times, frame)

    def __call__(self, encoded: bytes, times: StageTimes, frame: int = 0) -> UprightImage:
        """Decode an image; `frame` is one of `pages_of`, and errors are as for `pages`."""
        image = open_image(encoded, self._limits, frame=frame)
        times.record_header(image.format, image.size_wh)
        stored = image.pixels(_shrink(image), BACKGROUND, self._buffers)
        turn = TURNS[image.orientation]
        size_wh = image.size_wh[::-1] if turn.is_transposed else image.size_wh
        return UprightImage(_turned(_reduced(stored), turn), size_wh)


def _shrink(image: EncodedImage) -> int:
    allowed = max(image.size_wh) // MAX_SIDE_PX
    return max((factor for factor in SHRINKS if factor <= min(image.max_shrink, allowed)), default=1)


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


# Source: PP-OCRv6 small, its inference settings (limit_side_len 736, limit_type min).
MIN_SIDE_PX = 736
# The network halves each side five times.
STRIDE_PX = 32
# Long strips get a margin on their longer sides up to this ratio: text that fills the input is missed.
MAX_RATIO = 8
# (pixel - 127.5) / 127.5, for each channel.
LEVEL = 127.5


class DetectorInput:
    """One image as the detector sees it.

    Attributes:
        tensor: float32[1, 3, H, W], BGR, -1..1.
        scale_xy: converts positions in the tensor to pixel positions.
        offset_xy: subtracted afterwards: the margin of a strip, in pixels.
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
        """Convert points float32[..., 2] in the tensor to pixel positions."""
        positions: np.ndarray = points * self.scale_xy - self.offset_xy
        return positions


def network_size(width: int, height: int) -> tuple[int, int]:
    """Return the width and height at which text is detected in an image.

    The shorter side is at least `MIN_SIDE_PX`, unless the longer one would exceed `MAX_SIDE_PX`.
    """
    factor = min(max(1.0, MIN_SIDE_PX / min(width, height)), MAX_SIDE_PX / max(width, height))
    width, height = (max(1, round(side * factor / STRIDE_PX)) * STRIDE_PX for side in (width, height))
    return width, height


def normalised(pixels: np.ndarray) -> np.ndarray:
    """Convert RGB uint8[H, W, 3] to float32[1, 3, H, W], BGR, -1..1: the networks were trained on BGR."""
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


# Height of the recogniser's input. Source: PP-OCRv6 small, its inference settings (48 x 320).
LINE_HEIGHT_PX = 48
# Longer lines are squeezed to this width.
MAX_LINE_WIDTH_PX = 3200
# A box this much taller than wide contains vertical text.
TALL_RATIO = 1.5


def along_text(boxes: np.ndarray) -> np.ndarray:
    """Rotate the corners of tall boxes [N, 4, 2] so that the first side of every box runs along its text."""
    width, height = side_lengths(boxes)
    return np.where((height >= TALL_RATIO * width)[:, None, None], np.roll(boxes, -1, axis=1), boxes)


def side_lengths(boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the lengths of boxes [N, 4, 2] along and across the text, float32[N] each."""
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


# The network halves the width three times, so widths must be multiples of this.
STEP_PX = 8
# Lines share a batch if their widths differ by at most this fraction, because padding is wasted work.
MAX_PADDING = 1 / 16
# Total width of the lines in a batch, in pixels. Larger batches are not faster on a CPU and need more memory.
BATCH_WIDTH_PX = 2560


def batches(widths: Sequence[int], batch_width_px: int = BATCH_WIDTH_PX) -> Iterator[tuple[list[int], int]]:
    """Yield the indices of each batch's lines, and the batch's width.

    Args:
        widths: widths of all lines, in pixels.
        batch_width_px: limit on the sum of the widths in a batch of more than one line.
    """
    group: list[int] = []
    wide = 0
    for index in sorted(range(len(widths)), key=widths.__getitem__, reverse=True):
        is_near = widths[index] >= wide * (1 - MAX_PADDING)
        if group and not (is_near and (len(group) + 1) * wide <= batch_width_px):
            yield group, wide
            group = []
        if not group:
            wide = -(-widths[index] // STEP_PX) * STEP_PX
        group.append(index)
    if group:
        yield group, wide


def stacked(lines: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Stack lines uint8[48, W, 3], RGB, as float32[N, 3, 48, width], BGR, -1..1, zero-padded on the right."""
    tensor = np.zeros((len(lines), 3, LINE_HEIGHT_PX, width), np.float32)
    for row, line in zip(tensor, lines, strict=True):
        inside = row[:, :, : line.shape[1]]
        np.multiply(line[:, :, ::-1].transpose(2, 0, 1), np.float32(1 / LEVEL), out=inside)
        inside -= 1
    return tensor

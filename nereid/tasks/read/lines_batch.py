"""Lines of several images, joined to batches of similar width."""

from collections.abc import Iterator, Sequence

import numpy as np

from nereid.tasks.read.crops import LINE_HEIGHT_PX
from nereid.tasks.read.detector_input import LEVEL

# The network halves the width three times, so widths are multiples of this.
STEP_PX = 8
# Lines share a batch if their widths differ by at most this part: the padding is work for nothing.
MAX_PADDING = 1 / 16
# Pixels in a row of all lines of a batch. A larger batch is not faster on a CPU, and takes more memory.
BATCH_WIDTH_PX = 2560


def batches(widths: Sequence[int], batch_width_px: int = BATCH_WIDTH_PX) -> Iterator[tuple[list[int], int]]:
    """Yield the places of the lines of each batch, and the width of the batch.

    Args:
        widths: of all lines, in pixels.
        batch_width_px: limit on the sum of the widths of a batch, unless it has one line.
    """
    group: list[int] = []
    wide = 0
    for place in sorted(range(len(widths)), key=widths.__getitem__, reverse=True):
        is_near = widths[place] >= wide * (1 - MAX_PADDING)
        if group and not (is_near and (len(group) + 1) * wide <= batch_width_px):
            yield group, wide
            group = []
        if not group:
            wide = -(-widths[place] // STEP_PX) * STEP_PX
        group.append(place)
    if group:
        yield group, wide


def stacked(lines: Sequence[np.ndarray], width: int) -> np.ndarray:
    """Return lines uint8[48, W, 3], RGB, as float32[N, 3, 48, width], BGR, -1..1, with zeros at the right."""
    tensor = np.zeros((len(lines), 3, LINE_HEIGHT_PX, width), np.float32)
    for row, line in zip(tensor, lines, strict=True):
        inside = row[:, :, : line.shape[1]]
        np.multiply(line[:, :, ::-1].transpose(2, 0, 1), np.float32(1 / LEVEL), out=inside)
        inside -= 1
    return tensor

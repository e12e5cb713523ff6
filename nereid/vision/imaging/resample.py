"""Antialiased resampling as banded matrix products: Pillow's filters and arithmetic at BLAS speed.

An `Axis` holds the weights of the source pixels for the outputs along one axis of an image. If a JPEG was
decoded at a fraction of its size, the source values are averages of blocks of pixels. The weights then
estimate the outputs of the full-size pixels from these averages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from threadpoolctl import threadpool_limits

from nereid.vision.imaging.decode import Buffers

# Each image is processed on one core; instances and decode threads, not BLAS, spread the load.
threadpool_limits(1, "blas")

# Outputs per matrix product: a larger block multiplies more zeros, a smaller block needs more calls.
BLOCK = 16
# A pixel is estimated from the average of its own block and of this many blocks on either side.
REACH = 3
# Source values per conversion to float, few enough for a core's cache.
CHUNK = 2**17


def _box(x: np.ndarray) -> np.ndarray:
    return ((x > -0.5) & (x <= 0.5)).astype(np.float64)


def _bilinear(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 1, 1.0 - np.abs(x), 0.0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)


@dataclass(frozen=True, slots=True)
class Filter:
    """A resampling filter: its weight at a distance, and the distance beyond which it is 0, in pixels."""

    weight: Callable[[np.ndarray], np.ndarray]
    support_px: float


# Source: Pillow, src/libImaging/Resample.c; bicubic has a = -0.5, lanczos three lobes.
FILTERS = {
    "box": Filter(_box, 0.5),
    "bilinear": Filter(_bilinear, 1.0),
    "bicubic": Filter(_bicubic, 2.0),
    "lanczos": Filter(_lanczos, 3.0),
}


@dataclass(frozen=True, slots=True)
class ResizeCrop:
    """The wanted outputs of an axis of `source` pixels: `count` of `resized` ones, from `offset` on."""

    source: int
    resized: int
    offset: int
    count: int

    @property
    def scale(self) -> float:
        """Source pixels per output."""
        return self.source / self.resized


@dataclass(frozen=True, slots=True)
class Block:
    """Adjacent outputs of an axis, with `weights` float32[outputs, sources] of a window of source values."""

    weights: np.ndarray
    sources: slice
    outputs: slice


@dataclass(frozen=True, slots=True)
class Axis:
    """Blocks for all outputs along one axis, some possibly twice, over source values from `first` on.

    A source value is the average of `shrink` pixels. If `overshoots`, an output may be brighter or darker
    than all source values.
    """

    blocks: tuple[Block, ...]
    first: int
    shrink: int
    overshoots: bool

    @property
    def last(self) -> int:
        """Index after the last source value used."""
        return self.first + max(int(block.sources.stop) for block in self.blocks)

    @property
    def count(self) -> int:
        """Number of outputs along the axis."""
        return max(int(block.outputs.stop) for block in self.blocks)


def build_axis(span: ResizeCrop, filter_name: str, antialias: bool = True, shrink: int = 1) -> Axis:
    """Build the weights of one axis.

    Args:
        filter_name: a key of FILTERS.
        antialias: whether to widen the filter to all pixels that one output replaces; otherwise it spans only
            neighbours.
        shrink: number of pixels that the decoder averaged into one source value.
    """
    starts, taps = _taps(span, FILTERS[filter_name], antialias)
    size = min(BLOCK, span.count)
    outputs = np.minimum(np.arange(0, span.count, size), span.count - size)
    lows = starts[outputs] // shrink
    lasts = starts[outputs + size - 1] + taps.shape[1] - 1
    cells = int((lasts // shrink - lows).max()) + 1
    band = np.zeros((len(outputs), size, cells * shrink))
    rows = outputs[:, None] + np.arange(size)
    columns = (starts[rows] - lows[:, None] * shrink)[..., None] + np.arange(taps.shape[1])
    np.put_along_axis(band, columns, taps[rows], axis=2)
    if shrink > 1:
        band, lows = _of_averages(band, shrink), lows - REACH
    band, lows = _inside(band, lows, -(-span.source // shrink))
    first = int(lows.min())
    blocks = (
        Block(weights, slice(low, low + band.shape[2]), slice(output, output + size))
        for weights, low, output in zip(band.astype(np.float32), lows - first, outputs, strict=True)
    )
    return Axis(tuple(blocks), first, shrink, bool((band < 0).any()))


def _taps(span: ResizeCrop, chosen: Filter, antialias: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the first source pixel of each output, and the weights from that pixel on.

    Source: Pillow, precompute_coeffs in src/libImaging/Resample.c.
    """
    widened = max(span.scale, 1.0) if antialias else 1.0
    support = chosen.support_px * widened
    centers = (np.arange(span.offset, span.offset + span.count) + 0.5) * span.scale
    lows = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    highs = np.minimum((centers + support + 0.5).astype(np.int64), span.source)
    length = int((highs - lows).max())
    starts = np.minimum(lows, span.source - length)
    positions = starts[:, None] + np.arange(length)
    weights = chosen.weight((positions + 0.5 - centers[:, None]) / widened)
    weights[(positions < lows[:, None]) | (positions >= highs[:, None])] = 0
    return starts, weights / weights.sum(1, keepdims=True)


def _inside(band: np.ndarray, lows: np.ndarray, extent: int) -> tuple[np.ndarray, np.ndarray]:
    """Move windows that exceed the source inside, and add the weights outside to the edge."""
    window = min(band.shape[2], extent)
    moved = np.clip(lows, 0, extent - window)
    inside = band[:, :, :window].copy()
    for block in np.flatnonzero(moved != lows) if window == band.shape[2] else range(len(band)):
        inside[block] = 0
        positions = np.clip(lows[block] + np.arange(band.shape[2]), 0, extent - 1) - moved[block]
        np.add.at(inside[block].T, positions, band[block].T)
    return inside, moved


def _of_averages(band: np.ndarray, shrink: int) -> np.ndarray:
    """Convert weights of pixels to weights of their blocks' averages, and of REACH more on either side."""
    blocks, size, pixels = band.shape
    cells, reached = pixels // shrink, 2 * REACH + 1
    parts = (band.reshape(-1, shrink) @ estimate(shrink)).reshape(blocks, size, cells, reached)
    weights = np.zeros((blocks, size, cells + reached - 1))
    for neighbour in range(reached):
        weights[:, :, neighbour : neighbour + cells] += parts[..., neighbour]
    return weights


@lru_cache(maxsize=8)
def estimate(shrink: int) -> np.ndarray:
    """Return the weights float64[shrink, 2 * REACH + 1] of block averages that estimate a block's pixels.

    This is the best linear unbiased estimate if the difference of two pixels grows with their distance.
    Without it, the blur of the averages would add to the filter's.

    Source: ordinary kriging with a linear variogram; Cressie, Statistics for Spatial Data, 1993.
    """
    blocks = 2 * REACH + 1
    positions = np.arange(blocks * shrink, dtype=np.float64)
    distances = np.abs(positions[:, None] - positions)
    average = np.kron(np.eye(blocks), np.full((1, shrink), 1 / shrink))
    system = np.ones((blocks + 1, blocks + 1))
    system[:blocks, :blocks] = average @ distances @ average.T
    system[blocks, blocks] = 0
    targets = np.ones((blocks + 1, shrink))
    targets[:blocks] = average @ distances[:, REACH * shrink : (REACH + 1) * shrink]
    solution: np.ndarray = np.linalg.solve(system, targets)[:blocks].T
    return solution


def resample(pixels: np.ndarray, rows: Axis, columns: Axis, buffers: Buffers) -> Iterator[np.ndarray]:
    """Resample uint8[H, W, C]; yield float32[rows.count, columns.count] per channel, whole numbers 0..255.

    Values are resampled along the rows, then along the columns, and rounded to 8 bits after each, as in
    Pillow; estimates are rounded only at the end. A plane in `buffers` is valid until the next is requested.
    """
    pixels = pixels[rows.first : rows.last, columns.first : columns.last]
    height, _, channels = pixels.shape
    across = buffers.take("across", (height, columns.count))
    down = buffers.take("down", (rows.count, columns.count))
    for channel in range(channels):
        _resample_rows(pixels[:, :, channel], columns, across, buffers)
        if rows.shrink == columns.shrink == 1:
            _round(across, columns.overshoots)
        for block in rows.blocks:
            np.matmul(block.weights, across[block.sources], down[block.outputs])
        _round(down, rows.overshoots or columns.overshoots)
        yield down


def _resample_rows(plane: np.ndarray, columns: Axis, across: np.ndarray, buffers: Buffers) -> None:
    """Resample every row of uint8[H, W] into `across`, float32[H, columns.count]."""
    height, width = plane.shape
    step = min(height, max(1, CHUNK // width))
    floats = buffers.take("floats", (step, width))
    for top in range(0, height, step):
        some, target = plane[top : top + step], across[top : top + step]
        source = floats[: len(some)]
        np.copyto(source, some)
        for block in columns.blocks:
            np.matmul(source[:, block.sources], block.weights.T, target[:, block.outputs])


def _round(values: np.ndarray, overshoots: bool) -> None:
    """Round to whole numbers 0..255 in place, halves up as Pillow does."""
    np.add(values, np.float32(0.5), values)
    np.floor(values, values)
    if overshoots:
        # The limits are rows rather than scalars, because NumPy 1.26 has SIMD code only for arrays.
        np.maximum(values, np.zeros(values.shape[1], np.float32), values)
        np.minimum(values, np.full(values.shape[1], 255, np.float32), values)

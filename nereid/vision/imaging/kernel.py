"""Compiler options and arguments for the kernel `preprocess.cu`, computed without a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from nereid.vision.imaging.transform import Placement, Transform

SOURCE = Path(__file__).with_name("preprocess.cu")
# Threads that are adjacent in x read adjacent bytes.
BLOCK_XY = (32, 8)

# The structs of preprocess.cu.
AXIS = np.dtype(
    {
        "names": ("scale", "widening", "stride", "size", "offset", "at", "count"),
        "formats": ("f8", "f8", "i8", "i4", "i4", "i4", "i4"),
    }
)
IMAGE = np.dtype([("origin", "u8"), ("rows", AXIS), ("columns", AXIS)])
CHANNEL = np.dtype([("padding", "f4"), ("mean", "f4"), ("factor", "f4"), ("at", "i4")])
CHANNELS = np.dtype([("rgb", CHANNEL, 3)])


@dataclass(frozen=True, slots=True)
class Source:
    """A decoded image on the device: uint8[H, W, 3], RGB, in the stored orientation.

    `pointer` is the address of the first byte, `pitch_bytes` the distance between rows.
    """

    pointer: int
    pitch_bytes: int
    height: int
    width: int
    orientation: int = 1


def options(transform: Transform) -> tuple[str, ...]:
    """Return the kernel's compiler options for this transform."""
    names = {"FILTER": transform.interpolation, "DATATYPE": transform.datatype, "LAYOUT": transform.layout}
    return tuple(f"-D{name}={value}" for name, value in names.items())


def grid(transform: Transform, images: int) -> tuple[int, int, int]:
    """Return the grid of `BLOCK_XY` blocks that covers this many rows of the tensor."""
    across, down = BLOCK_XY
    return -(-transform.width_px // across), -(-transform.height_px // down), images


def build_channels(transform: Transform) -> np.ndarray:
    """Return CHANNELS[1]: normalisation and position of R, G and B."""
    channels = np.zeros(1, CHANNELS)
    for position, color in enumerate(transform.color_order):
        mean, std = transform.mean[position], transform.std[position]
        padding = (transform.pad_color[position] - mean) / std
        channels["rgb"][0, "RGB".index(color)] = padding, mean, 1 / std, position
    return channels


def build_table(sources: Sequence[Source | None], transform: Transform, out: np.ndarray) -> None:
    """Describe a batch to the kernel.

    Args:
        sources: one per row of the tensor; for None, the kernel writes padding only.
        out: IMAGE[len(sources)].
    """
    out[:] = np.zeros(1, IMAGE)
    for row, source in enumerate(sources):
        if source is not None:
            out[row] = _described(replace(source, pointer=0), transform)
            out["origin"][row] += np.uint64(source.pointer)


@lru_cache(maxsize=1024)  # most images of a service share a few sizes
def _described(source: Source, transform: Transform) -> np.void:
    entry: np.void = np.zeros(1, IMAGE)[0]
    turn = transform.turn(source.orientation)
    sizes, strides = [source.height, source.width], [source.pitch_bytes, 3]
    if turn.is_transposed:
        sizes.reverse()
        strides.reverse()
    entry["origin"] = source.pointer
    flips = turn.flips_rows, turn.flips_columns
    placed = transform.place((sizes[1], sizes[0]))
    for name, size, stride, is_flipped, placement in zip(
        ("rows", "columns"), sizes, strides, flips, placed, strict=True
    ):
        if is_flipped:
            entry["origin"] += np.uint64((size - 1) * stride)
            stride = -stride
        entry[name] = _axis(placement, transform.antialias, stride)
    return entry


def _axis(placement: Placement, antialias: bool, stride: int) -> tuple[float | int, ...]:
    span = placement.span
    widening = max(span.scale, 1.0) if antialias else 1.0
    return span.scale, widening, stride, span.source, span.offset, placement.at, span.count

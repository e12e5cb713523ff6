"""Transformation of images into network inputs: turn upright, resize, crop or pad, normalise, lay out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isfinite

import numpy as np

from nereid.vision.imaging.decode import SHRINKS, Buffers, EncodedImage
from nereid.vision.imaging.resample import FILTERS, Axis, ResizeCrop, build_axis, resample

DATATYPES = {"FP32": np.float32, "FP16": np.float16, "UINT8": np.uint8}
MAX_VALUE = {"FP32": 3.4e38, "FP16": 65504.0, "UINT8": 255.0}
CHOICES = {
    "datatype": tuple(DATATYPES),
    "layout": ("NCHW", "NHWC"),
    "resize": ("shorter_side", "exact", "letterbox"),
    "interpolation": tuple(FILTERS),
    "color_order": ("RGB", "BGR"),
    "pad_position": ("around", "after"),
}


@dataclass(frozen=True, slots=True)
class Turn:
    """How to turn stored pixels upright: swap rows and columns if transposed, then flip each as needed."""

    is_transposed: bool
    flips_rows: bool
    flips_columns: bool

    def __call__(self, plane: np.ndarray) -> np.ndarray:
        """Return the upright view of a stored plane."""
        rows, columns = (
            slice(None, None, -1 if flips else 1) for flips in (self.flips_rows, self.flips_columns)
        )
        return (plane.T if self.is_transposed else plane)[rows, columns]


# Keyed by the EXIF tag Orientation. Source: CIPA DC-008, 4.6.4.
TURNS = {
    orientation: Turn(orientation > 4, orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7))
    for orientation in range(1, 9)
}


@dataclass(frozen=True, slots=True)
class Placement:
    """Position of an upright image along one axis: the outputs of `span`, from output pixel `at` on."""

    span: ResizeCrop
    at: int = 0

    @property
    def inside(self) -> slice:
        """The output pixels that the image covers; letterboxing pads the others."""
        return slice(self.at, self.at + self.span.count)

    def stored(self, is_flipped: bool) -> ResizeCrop:
        """Return the same part of the stored image, which may be mirrored."""
        span = self.span
        return replace(span, offset=span.resized - span.offset - span.count) if is_flipped else span


@dataclass(frozen=True, slots=True)
class Transform:
    """Transformation of an image to a network's input of `height_px` × `width_px`.

    `resize` is `shorter_side` (to `resize_shorter_px`, then crop the centre), `exact` (both sides) or
    `letterbox` (to fit, then pad with `pad_color`, `around` the image or `after` it, at the bottom or right).
    Each pixel of 0..255 then becomes (pixel - mean) / std. `mean`, `std` and `pad_color` have one number per
    channel in `color_order`; `background_color`, behind transparent pixels, is R, G, B.

    A JPEG is decoded at a fraction of its size if that is still at least `decode_margin` times the resized
    image: a value closer to 1 is faster but less exact. Source of the default: docs/architecture.md.
    """

    height_px: int
    width_px: int
    datatype: str = "FP32"
    layout: str = "NCHW"
    resize: str = "shorter_side"
    resize_shorter_px: int = 0
    interpolation: str = "bilinear"
    antialias: bool = True
    color_order: str = "RGB"
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    pad_color: tuple[int, ...] = (114, 114, 114)
    pad_position: str = "around"
    background_color: tuple[int, ...] = (255, 255, 255)
    exif_orientation: bool = True
    decode_margin: float = 1.05

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got '{getattr(self, name)}'")
        side_px, output = self.resize_shorter_px, f"{self.height_px} x {self.width_px}"
        if self.resize == "shorter_side" and side_px < max(self.height_px, self.width_px):
            raise ValueError(f"resize_shorter_px: expected at least the output's {output}, got {side_px}")
        if self.resize != "shorter_side" and side_px:
            raise ValueError(f"resize_shorter_px = {side_px} contradicts resize = {self.resize}")
        for name in ("mean", "std", "pad_color", "background_color"):
            if len(values := getattr(self, name)) != 3 or not all(map(isfinite, values)):
                raise ValueError(f"{name}: expected 3 numbers, got {values}")
            if name.endswith("color") and not all(0 <= level <= 255 for level in values):
                raise ValueError(f"{name}: expected 0..255, got {values}")
        if not all(0 < std < inf for std in self.std):
            raise ValueError(f"std: expected positive numbers, got {self.std}")
        numbers = zip(self.mean, self.std, strict=True)
        if max(max(abs(mean), abs(255 - mean)) / std for mean, std in numbers) > MAX_VALUE[self.datatype]:
            raise ValueError(f"mean {self.mean} and std {self.std}: expected pixels within {self.datatype}")
        if not self.decode_margin >= 1:
            raise ValueError(f"decode_margin: expected 1 or more, got {self.decode_margin}")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one output."""
        if self.layout == "NHWC":
            return self.height_px, self.width_px, 3
        return 3, self.height_px, self.width_px

    def turn(self, orientation: int) -> Turn:
        """Return the turn of an image with this EXIF orientation."""
        return TURNS[orientation if self.exif_orientation else 1]

    def place(self, size_wh: tuple[int, int]) -> tuple[Placement, Placement]:
        """Return the placement of the rows and columns of an upright image of this size.

        Source of sizes and offsets: torchvision's `Resize` and `CenterCrop`, ultralytics' `LetterBox`.
        """
        width, height = size_wh
        if self.resize == "exact":
            return _crop(height, self.height_px, self.height_px), _crop(width, self.width_px, self.width_px)
        if self.resize == "letterbox":
            ratio = min(self.height_px / height, self.width_px / width)
            return self._fit(height, ratio, self.height_px), self._fit(width, ratio, self.width_px)
        rows, columns = (int(self.resize_shorter_px * side / min(size_wh)) for side in (height, width))
        return _crop(height, rows, self.height_px), _crop(width, columns, self.width_px)

    def _fit(self, source: int, ratio: float, target: int) -> Placement:
        resized = min(target, max(1, round(source * ratio)))
        at = (target - resized) // 2 if self.pad_position == "around" else 0
        return Placement(ResizeCrop(source, resized, 0, resized), at)

    def __call__(
        self,
        image: EncodedImage,
        out: np.ndarray,
        buffers: Buffers,
        decoded: Callable[[], None] = lambda: None,
    ) -> None:
        """Decode `image`, and write its network input into `out`, an array of `shape` and `datatype`.

        Args:
            buffers: the calling thread's memory.
            decoded: called after decoding.

        Raises:
            InvalidImage: the file is damaged.
        """
        plan = make_plan(self, image.size_wh, image.orientation, image.max_shrink)
        pixels = image.pixels(plan.shrink, self.background_color, buffers)
        decoded()
        if self.color_order == "BGR":
            pixels = pixels[:, :, ::-1]
        targets = out if self.layout == "NCHW" else out.transpose(2, 0, 1)
        if plan.has_margin:
            for target, level, mean, std in zip(targets, self.pad_color, self.mean, self.std, strict=True):
                target[:] = (level - mean) / std
        planes = resample(pixels, plan.rows, plan.columns, buffers)
        for plane, target, mean, std in zip(planes, targets, self.mean, self.std, strict=True):
            np.subtract(plane, np.float32(mean), out=plane)
            upright = plan.turn(plane)
            np.multiply(upright, np.float32(1 / std), out=target[plan.inside], casting="unsafe")


@dataclass(frozen=True, slots=True)
class Plan:
    """Values that depend on an image's size and orientation; `rows` and `columns` are as stored."""

    shrink: int
    rows: Axis
    columns: Axis
    turn: Turn
    inside: tuple[slice, slice]
    has_margin: bool


# Only a few, because the plan for a huge image is large and a file may claim any size.
@lru_cache(maxsize=32)
def make_plan(transform: Transform, size_wh: tuple[int, int], orientation: int, max_shrink: int) -> Plan:
    """Return the plan for images of this size, which the decoder can shrink up to `max_shrink` times."""
    turn = transform.turn(orientation)
    placed = transform.place(size_wh[::-1] if turn.is_transposed else size_wh)
    min_scale = min(placement.span.scale for placement in placed) if transform.antialias else 1
    scalable = [
        shrink for shrink in SHRINKS if shrink <= min(max_shrink, min_scale / transform.decode_margin)
    ]
    shrink = max(scalable, default=1)
    rows, columns = (
        build_axis(placement.stored(is_flipped), transform.interpolation, transform.antialias, shrink)
        for placement, is_flipped in zip(placed, (turn.flips_rows, turn.flips_columns), strict=True)
    )
    if turn.is_transposed:
        rows, columns = columns, rows
    inside = placed[0].inside, placed[1].inside
    covered = placed[0].span.count, placed[1].span.count
    has_margin = covered != (transform.height_px, transform.width_px)
    return Plan(shrink, rows, columns, turn, inside, has_margin)


def _crop(source: int, resized: int, target: int) -> Placement:
    return Placement(ResizeCrop(source, resized, round((resized - target) / 2), target))

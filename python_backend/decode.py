"""From an encoded image to RGB pixels: no larger than asked for, and never trusting the file."""

import io
from dataclasses import dataclass

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from python_backend.errors import InvalidImage

# Our own limit is checked on every header; Pillow's would only warn and raise in between.
Image.MAX_IMAGE_PIXELS = None

JPEG_MAGIC = b"\xff\xd8\xff"
MAX_IMAGE_BYTES = 32 * 2**20
MAX_IMAGE_PIXELS = 64_000_000
# What libjpeg says of files that any viewer shows without a word.
HARMLESS = "extraneous bytes before marker"
# Pillow's modes of 8 bits per channel or less; wider ones would be clipped to white.
MODES = frozenset(
    {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV"}
)
FORMATS = ("PNG", "WEBP", "BMP", "GIF", "TIFF", "JPEG")


@dataclass(frozen=True, slots=True)
class Limits:
    """What an image may cost before any pixel of it is decoded."""

    max_image_bytes: int = MAX_IMAGE_BYTES
    max_image_pixels: int = MAX_IMAGE_PIXELS


@dataclass(frozen=True, slots=True)
class Decoded:
    """`pixels` uint8[H, W, 3] RGB; `size_wh` is the image's own size, which a scaled decode undercuts."""

    pixels: np.ndarray
    size_wh: tuple[int, int]


def decode(encoded: bytes, min_side_px: int, limits: Limits) -> Decoded:
    """Decode one image file; a JPEG at the smallest fast scale whose shorter side is still `min_side_px`.

    Raises:
        InvalidImage: not an image of a known format, truncated, or beyond `limits`.
    """
    if not encoded:
        raise InvalidImage(f"expected the bytes of an image file ({', '.join(FORMATS)}), got 0 bytes")
    if len(encoded) > limits.max_image_bytes:
        raise InvalidImage(f"expected at most {limits.max_image_bytes} bytes, got {len(encoded)}")
    if encoded[:3] == JPEG_MAGIC:
        return _decode_jpeg(encoded, min_side_px, limits)
    return _decode_other(encoded, limits)


def jpeg_scale(size_wh: tuple[int, int], min_side_px: int) -> int:
    """Return how many eighths of its size a JPEG may shrink to while decoding: 8, 4, 2 or 1.

    Only these have SIMD code in libjpeg-turbo: a 640×427 photo decodes faster at 8/8 (0.82 ms) than at
    5/8 (1.02 ms). Source: loadtest/results/pieces.json.
    """
    eighths = 8
    while eighths > 1 and min(size_wh) * (eighths // 2) >= min_side_px * 8:
        eighths //= 2
    return eighths


def _decode_jpeg(encoded: bytes, min_side_px: int, limits: Limits) -> Decoded:
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(encoded, strict=False)
    except Exception:  # on damaged headers simplejpeg raises ValueError, KeyError and more
        raise InvalidImage(f"JPEG of {len(encoded)} bytes has no readable header") from None
    _check_pixels(width, height, limits)
    if colorspace in ("CMYK", "YCCK"):
        return _decode_other(encoded, limits)
    eighths = jpeg_scale((width, height), min_side_px)
    # simplejpeg picks the smallest scale that keeps these sizes, which is exactly `eighths`.
    size = {"min_height": -(-height * eighths // 8), "min_width": -(-width * eighths // 8)}
    try:
        return Decoded(_rgb(encoded, size), (width, height))
    except Exception as error:  # on damaged files simplejpeg raises ValueError, KeyError and more
        raise InvalidImage(f"JPEG of {len(encoded)} bytes is damaged: {error}") from None


def _rgb(encoded: bytes, size: dict[str, int]) -> np.ndarray:
    try:
        pixels: np.ndarray = simplejpeg.decode_jpeg(encoded, "RGB", **size)
    except ValueError as error:
        if HARMLESS not in str(error):
            raise
        pixels = simplejpeg.decode_jpeg(encoded, "RGB", **size, strict=False)
    return pixels


def _decode_other(encoded: bytes, limits: Limits) -> Decoded:
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            _check_pixels(*image.size, limits)
            if image.mode not in MODES:
                raise InvalidImage(f"expected 8 bits per channel, got {image.format} of mode {image.mode}")
            return Decoded(np.asarray(image.convert("RGB")), image.size)
    except InvalidImage:
        raise
    except UnidentifiedImageError:
        got = f"{len(encoded)} bytes starting with {encoded[:8]!r}"
        raise InvalidImage(f"expected an image file ({', '.join(FORMATS)}), got {got}") from None
    except Exception as error:  # on damaged files Pillow raises whatever its parsers run into
        raise InvalidImage(f"file of {len(encoded)} bytes is damaged: {error}") from None


def _check_pixels(width: int, height: int, limits: Limits) -> None:
    if width * height > limits.max_image_pixels:
        raise InvalidImage(f"expected at most {limits.max_image_pixels} pixels, got {width} x {height}")

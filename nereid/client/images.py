"""Conversion of image arguments to encoded image files, which the server decodes."""

import io
import os
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
from PIL import Image, ImageOps

from nereid.base.contract import MAX_IMAGE_BYTES

ImageLike: TypeAlias = (
    "bytes | bytearray | memoryview | str | os.PathLike[str] | IO[bytes] | Image.Image | np.ndarray"
)

# Errors raised by `encode`.
Unusable: TypeAlias = OSError | TypeError | ValueError
# BMP is as lossless as PNG and many times faster, but has no alpha, CMYK or 16-bit modes.
BMP_MODES = ("1", "L", "P", "RGB")
TIFF_MODES = ("RGBA", "CMYK", "I;16", "I;16B")
# Neither format supports these modes; the server would convert them the same way.
TO_RGB_MODES = ("RGBX", "YCbCr", "HSV")
HEADERS_BYTES = 4096


def encode(image: ImageLike) -> bytes:
    """Return an image as image file bytes: files are passed through unchanged, pixels are encoded losslessly.

    Args:
        image: bytes of an image file, its path, a file opened in binary mode, a PIL image, or an array
            uint8[H, W, 3] (RGB) or uint8[H, W] (grey). A PIL image is rotated by its EXIF orientation.

    Raises:
        OSError: a file cannot be read.
        TypeError: `image` has an unsupported type.
        ValueError: an array's shape or dtype or a PIL image's mode is unsupported, or the image is damaged.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, (bytearray, memoryview)):
        return bytes(image)
    if isinstance(image, (str, os.PathLike)):
        return Path(image).read_bytes()
    if isinstance(image, np.ndarray):
        return _from_pixels(_from_array(image))
    if isinstance(image, Image.Image):
        _load(image)
        return _from_pixels(ImageOps.exif_transpose(image))
    if not hasattr(image, "read"):
        expected = "bytes, a path, a binary file, a PIL image or a uint8 array"
        raise TypeError(f"an image must be {expected}, got {type(image).__name__}")
    content = image.read()
    if not isinstance(content, bytes):
        raise TypeError(f"a file must be opened for reading bytes, this one reads {type(content).__name__}")
    return content


def name_of(image: ImageLike, position: int) -> str:
    """Return an image's path or, if it has none, its `position` in `images`, counted from 0."""
    name = image if isinstance(image, (str, os.PathLike)) else None
    name = name or getattr(image, "filename", None) or getattr(image, "name", None)
    try:
        return os.fsdecode(name or f"images[{position}]")
    except TypeError:  # the name of a file without a path is a number
        return f"images[{position}]"


def encode_or_error(image: ImageLike) -> bytes | Unusable:
    """Return the encoded image, or the error that `encode` raised."""
    try:
        return encode(image)
    except (OSError, TypeError, ValueError) as error:
        return error


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except (OSError, MemoryError):
        raise
    except Exception as error:  # PIL raises almost any error on a damaged file, such as SyntaxError
        raise ValueError(f"a PIL image cannot be read: {type(error).__name__}: {error}") from None


def _from_array(pixels: np.ndarray) -> Image.Image:
    is_grey, is_rgb = pixels.ndim == 2, pixels.ndim == 3 and pixels.shape[2] == 3
    if pixels.dtype != np.uint8 or not (is_grey or is_rgb) or not pixels.size:
        got = f"{pixels.dtype}{list(pixels.shape)}"
        raise ValueError(f"an array must be uint8[H, W, 3] in RGB, or uint8[H, W], and not empty, got {got}")
    return Image.fromarray(np.ascontiguousarray(pixels))


def _from_pixels(image: Image.Image) -> bytes:
    # PNG stores the transparent level; RGBA would clip levels above 255.
    is_keyed = image.mode.startswith("I;16") and image.has_transparency_data
    if image.has_transparency_data and not is_keyed:
        image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
    if image.mode in TO_RGB_MODES:
        image = image.convert("RGB")
    if image.mode not in BMP_MODES + TIFF_MODES:
        modes = ", ".join((*BMP_MODES, *TIFF_MODES, *TO_RGB_MODES))
        raise ValueError(f"a PIL image must have one of the modes {modes}, or alpha, got {image.mode}")
    bytes_per_pixel = len(image.getbands()) * (2 if image.mode.startswith("I;16") else 1)
    target = io.BytesIO()
    if is_keyed:
        image.save(target, "PNG", compress_level=1)
    elif image.width * image.height * bytes_per_pixel + image.height * 4 + HEADERS_BYTES <= MAX_IMAGE_BYTES:
        image.save(target, "BMP" if image.mode in BMP_MODES else "TIFF")
    elif image.mode == "CMYK":
        image.save(target, "TIFF", compression="tiff_adobe_deflate")
    else:
        image.save(target, "PNG", compress_level=1)
    return target.getvalue()

"""Small files that take a server seconds, and say so or not."""

import io
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from PIL import Image

SIDE = 8000


def _saved(image_format: str, side: int = SIDE, **options: Any) -> bytes:
    with io.BytesIO() as file:
        Image.new("RGB", (side, side)).save(file, image_format, **options)
        return file.getvalue()


@cache
def large_webp() -> bytes:
    """Return 64 megapixels in a few kB."""
    return _saved("WEBP", lossless=True)


@cache
def hidden_gif() -> bytes:
    """Return a frame of 64 megapixels on a screen of one pixel."""
    gif = _saved("GIF")
    return gif[:6] + struct.pack("<HH", 1, 1) + gif[10:]


@cache
def scanned_jpeg() -> bytes:
    """Return a progressive JPEG with junk at its end, for which it was decoded twice."""
    jpeg = _saved("JPEG", SIDE // 2, progressive=True)
    return jpeg[:-2] + bytes(5) + jpeg[-2:]


@cache
def padded_jpeg() -> bytes:
    """Return a progressive JPEG whose size follows 1 MiB of comments."""
    jpeg = _saved("JPEG", SIDE // 2, progressive=True)
    return jpeg[:2] + (b"\xff\xfe\xff\xff" + bytes(65_533)) * 17 + jpeg[2:]


COSTLY: Mapping[str, Callable[[], bytes]] = {
    "a WebP of 64 megapixels": large_webp,
    "a GIF that hides 64 megapixels": hidden_gif,
    "a progressive JPEG with junk": scanned_jpeg,
    "a JPEG behind 1 MiB": padded_jpeg,
}

"""Pictures made in memory, Pillow's resizing of them, and how exactly ours must agree."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from nereid.vision.imaging.transform import Transform

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


# A PNG that declares 20,000 x 20,000 pixels, and has none of them.
BOMB = PNG_MAGIC + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0))
BOMB += png_chunk(b"IDAT", b"")


def save(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    target = io.BytesIO()
    image.save(target, image_format, **options)
    return target.getvalue()


def encode(pixels: np.ndarray, image_format: str = "PNG", mode: str | None = None, **options: Any) -> bytes:
    """Encode uint8 pixels as an image file, converted to a mode of Pillow's."""
    image = Image.fromarray(pixels)
    return save(image.convert(mode) if mode else image, image_format, **options)


def exif(orientation: int) -> Image.Exif:
    """Return the data of a photo whose pixels are stored in this orientation."""
    data = Image.Exif()
    data[0x0112] = orientation
    return data


def gradient(height: int, width: int) -> np.ndarray:
    """Return a smooth RGB picture, uint8[H, W, 3]; smooth, so that JPEG changes it little."""
    rows, columns = np.linspace(0, 255, height), np.linspace(0, 255, width)
    planes = np.broadcast_arrays(rows[:, None], columns[None, :], np.float64(96))
    return np.asarray(np.stack(planes, axis=-1), np.uint8)


def noise(height: int, width: int) -> np.ndarray:
    """Return random pixels, which show every shift, flip and filter: uint8[H, W, 3]."""
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


def resize(
    image: Image.Image, size_wh: tuple[int, int], method: Image.Resampling, rows_first: bool = True
) -> Image.Image:
    """Resize with Pillow, one axis after the other: in one call it chooses the order by the sizes."""
    between = (size_wh[0], image.height) if rows_first else (image.width, size_wh[1])
    return image.resize(between, method).resize(size_wh, method)


def levels(transform: Transform, row: np.ndarray) -> np.ndarray:
    """Undo layout and normalisation: 0..255, float64[H, W, 3], in the order of the tensor's colours."""
    last = row if transform.layout == "NHWC" else row.transpose(1, 2, 0)
    return np.asarray(last.astype(np.float64) * transform.std + transform.mean)


def assert_same_levels(actual: np.ndarray, expected: np.ndarray, filter_name: str = "") -> None:
    """Compare levels; a sum at .5 in one arithmetic and near .5 in another differs by one.

    A box takes the mean of, say, ten whole numbers, which is at .5 every tenth time.
    """
    differences = np.abs(actual.astype(float) - expected)
    assert actual.shape == expected.shape
    assert differences.max() <= 1
    assert (differences > 0).mean() <= (0.15 if filter_name == "box" else 0.01)

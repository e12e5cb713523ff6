"""PNG files with fewer rows than their header declares, in every form that stores rows."""

import struct
import zlib

import pytest

from nereid.base.errors import InvalidImage
from nereid.vision.imaging.decode import Buffers, Limits, open_image
from tests.pictures import PNG_MAGIC, png_chunk

SAMPLES = {"grey": (0, 1), "rgb": (2, 3), "palette": (3, 1), "grey and alpha": (4, 2), "rgba": (6, 4)}
# The passes of Adam7, from the specification's own picture of eight by eight pixels.
PICTURE = ("16462646", "77777777", "56565656", "77777777", "36463646", "77777777", "56565656", "77777777")


def rows(width: int, height: int, bits: int, is_interlaced: bool) -> list[int]:
    """Return the bits of each stored row, without its filter."""
    if not is_interlaced:
        return [width * bits] * height
    found = []
    for number in "1234567":
        for y in range(height):
            columns = sum(PICTURE[y % 8][x % 8] == number for x in range(width))
            found += [columns * bits] if columns else []
    return found


def image(size, kind: str, depth: int, is_interlaced: bool, missing: int, value: int) -> bytes:
    """Return a file whose last stored rows are missing, with all bytes of the others of one value."""
    color_type, samples = SAMPLES[kind]
    stored = rows(*size, samples * depth, is_interlaced)
    data = b"".join(b"\0" + bytes([value]) * -(-bits // 8) for bits in stored[: len(stored) - missing])
    header = struct.pack(">IIBBBBB", *size, depth, color_type, 0, 0, is_interlaced)
    palette = png_chunk(b"PLTE", bytes(range(256)) * 3) if kind == "palette" else b""
    packed = zlib.compress(data)
    parts = [png_chunk(b"IDAT", packed[:20]), png_chunk(b"IDAT", packed[20:])]
    return PNG_MAGIC + png_chunk(b"IHDR", header) + palette + b"".join(parts) + png_chunk(b"IEND", b"")


def decode(file: bytes):
    return open_image(file, Limits()).pixels(1, (0, 0, 0), Buffers())


FORMS = [
    (kind, depth)
    for kind, depths in {
        "grey": (1, 2, 4, 8, 16),
        "rgb": (8, 16),
        "palette": (1, 4, 8),
        "grey and alpha": (8, 16),
        "rgba": (8, 16),
    }.items()
    for depth in depths
]


@pytest.mark.parametrize("is_interlaced", [False, True], ids=["plain", "interlaced"])
@pytest.mark.parametrize("size", [(1, 1), (5, 3), (8, 8), (33, 20), (3, 41)])
@pytest.mark.parametrize(("kind", "depth"), FORMS)
def test_missing_rows_are_refused(kind, depth, size, is_interlaced):
    for value in (0, 0xFF):
        whole, cut = (image(size, kind, depth, is_interlaced, missing, value) for missing in (0, 1))

        assert decode(whole).shape == (size[1], size[0], 3)
        with pytest.raises(InvalidImage, match="is damaged: "):
            decode(cut)

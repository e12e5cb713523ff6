"""Checks of PNG files that Pillow does not perform. Source: the PNG specification, sections 5, 7 and 8."""

import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from nereid.base.errors import InvalidImage

if TYPE_CHECKING:  # routes read sizes without loading an image library
    from PIL import Image

MAGIC = b"\x89PNG\r\n\x1a\n"
# More would take longer to read than an image to decode.
MAX_CHUNKS = 65_536
# A chunk's length and type precede its data; a checksum follows it.
CHUNK = struct.Struct(">I4s")
CHECKSUM_BYTES = 4
TRANSPARENCY, EXIF = b"tRNS", b"eXIf"
# Width, height, bits per sample, colour type, compression, filter, interlace.
HEADER = struct.Struct(">IIBBBBB")
SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# The passes of an interlaced image: first column, first row, column step, row step.
PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
WHOLE = ((0, 0, 1, 1),)
STEP_BYTES = 2**16


def without_extras(encoded: bytes) -> bytes:
    """Return a PNG without the chunks that affect neither pixels nor orientation, such as text and profiles.

    A damaged one would make Pillow reject the whole image, possibly after decoding it.

    Raises:
        InvalidImage: it has more than `MAX_CHUNKS`.
    """
    view, parts, offset = memoryview(encoded), [memoryview(MAGIC)], len(MAGIC)
    for number, (kind, data) in enumerate(chunks(view)):
        if number == MAX_CHUNKS:
            raise InvalidImage(f"expected at most {MAX_CHUNKS} chunks in a PNG, got {number + 1} or more")
        end = offset + CHUNK.size + len(data) + CHECKSUM_BYTES
        if kind[:1].isupper() or kind == TRANSPARENCY or (kind == EXIF and _is_sound(view[offset:end])):
            parts.append(view[offset:end])
        offset = end
    return b"".join(parts)


def _is_sound(chunk: memoryview) -> bool:
    checked, checksum = chunk[CHUNK.size - 4 : -CHECKSUM_BYTES], chunk[-CHECKSUM_BYTES:]
    return zlib.crc32(checked) == int.from_bytes(checksum)


def check_complete(encoded: bytes, image: "Image.Image") -> None:
    """Check that a decoded PNG has all its rows; Pillow fills missing ones with zeros.

    Counting rows requires unpacking the file again, so this is done only if one of the last 2 × 2 pixels is
    zero: the last pass ends in one of the last two rows.

    Raises:
        InvalidImage: rows are missing.
    """
    last_pixels = [(max(0, image.width - x), max(0, image.height - y)) for x in (1, 2) for y in (1, 2)]
    if not all(_has_color(image, xy) for xy in last_pixels) and not _is_complete(encoded):
        raise InvalidImage(f"PNG of {len(encoded)} bytes is damaged: its rows end too early")


def _has_color(image: "Image.Image", xy: tuple[int, int]) -> bool:
    value = image.getpixel(xy)
    return any(value) if isinstance(value, tuple) else bool(value)


def _is_complete(encoded: bytes) -> bool:
    expected, stream = 0, zlib.decompressobj()
    for kind, data in chunks(encoded):
        if kind == b"IHDR":
            expected = _unpacked_bytes(data)
        while kind == b"IDAT" and data:
            expected -= len(stream.decompress(data, STEP_BYTES))
            data = stream.unconsumed_tail
            if expected <= 0:
                return True
    return False


def _unpacked_bytes(header: bytes | memoryview) -> int:
    width, height, bits, color_type, _, _, is_interlaced = HEADER.unpack(header)
    total = 0
    for left, top, right, down in PASSES if is_interlaced else WHOLE:
        columns, rows = -(-(width - left) // right), -(-(height - top) // down)
        if columns > 0:  # a pass without columns has no rows either
            total += max(0, rows) * (1 + -(-columns * SAMPLES[color_type] * bits // 8))
    return total


def chunks(encoded: bytes | memoryview) -> Iterator[tuple[bytes, bytes | memoryview]]:
    """Yield the type and the data of each chunk."""
    offset = len(MAGIC)
    while offset + CHUNK.size <= len(encoded):
        size, kind = CHUNK.unpack_from(encoded, offset)
        offset += CHUNK.size
        yield kind, encoded[offset : offset + size]
        offset += size + CHECKSUM_BYTES

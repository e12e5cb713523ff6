"""The header of an image file, and the cost of decoding it; an unclear structure counts as expensive."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from nereid.vision.imaging.formats import jpeg, png

CORE_HEADER_BYTES = 12
# Maximum parts before the pixels; the size of a file with more is treated as unknown.
MAX_PARTS = 4_096
_GIF = (b"GIF87a", b"GIF89a")
# Magic numbers accepted by Pillow's TIFF decoder.
TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+")
_WEBP = (b"VP8X", b"VP8L", b"VP8 ")


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What decoding a file costs.

    Attributes:
        is_jpeg: whether the decoder can shrink the image while decoding.
        size_wh: width and height of the largest image that the decoder may produce; None if only the decoder
            can tell, as for TIFF and PDF, whose directories can be anywhere in the file.
        passes: how often the decoder passes over all pixels.
    """

    is_jpeg: bool = False
    size_wh: tuple[int, int] | None = None
    passes: int = 1


def read_header(encoded: bytes | memoryview) -> ImageHeader | None:
    """Return the size of a file quickly, whatever it contains; None if no decoder opens it.

    Source: PNG 5, 11.2.2; GIF89a 18, 20; BITMAPCOREHEADER, BITMAPINFOHEADER; RFC 9649 2.5-2.7. As in
    Pillow 13, a PNG's header may follow other chunks, and a GIF's frame may extend beyond its screen.
    """
    head = bytes(encoded[:32])
    if head.startswith(jpeg.MAGIC):
        structure = jpeg.size_and_scans(encoded)
        return ImageHeader(True, *structure) if structure else ImageHeader(True)
    if head.startswith(png.MAGIC):
        size_wh, is_interlaced = _png(memoryview(encoded))
        return ImageHeader(size_wh=size_wh, passes=1 + is_interlaced)
    if head[:6] in _GIF:
        return ImageHeader(size_wh=_largest(_gif_frames(encoded)))
    if head.startswith(b"BM"):
        return ImageHeader(size_wh=_bmp_wh(head))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP" and head[12:16] in _WEBP:
        return ImageHeader(size_wh=_webp_wh(head))
    return ImageHeader() if has_pages(encoded) else None


def has_pages(encoded: bytes | memoryview | object) -> bool:
    """Return whether a file may have several pages, because it is a PDF or a TIFF."""
    return isinstance(encoded, (bytes, memoryview)) and (
        bytes(encoded[:4]).startswith(TIFF_MAGIC) or is_pdf(encoded)
    )


def is_pdf(encoded: bytes | memoryview) -> bool:
    """Return whether a file is a PDF, possibly after a byte order mark and spaces."""
    return bytes(encoded[:1024]).lstrip(b"\xef\xbb\xbf\0 \t\r\n").startswith(b"%PDF-")


def _largest(sizes: Iterator[tuple[int, int] | None]) -> tuple[int, int] | None:
    """Return the bounding box of all sizes; None if any is unknown."""
    frames = [*sizes]
    if not frames or None in frames:
        return None
    return max(frame[0] for frame in frames if frame), max(frame[1] for frame in frames if frame)


def _png(encoded: memoryview) -> tuple[tuple[int, int] | None, bool]:
    """Return the size and whether it is interlaced; the decoder uses the last header before the pixels."""
    size_wh, is_interlaced = None, False
    for kind, data in islice(png.chunks(encoded), MAX_PARTS):
        if kind == b"IHDR" and len(data) >= png.HEADER.size:
            width, height, *_, interlace = png.HEADER.unpack_from(data)
            size_wh, is_interlaced = (width, height), bool(interlace)
        elif kind == b"IDAT":
            return size_wh, is_interlaced
    return None, False


def _gif_frames(encoded: bytes | memoryview) -> Iterator[tuple[int, int] | None]:
    yield _pair(encoded, 6)
    flags = encoded[10] if len(encoded) > 12 else 0
    offset = 13 + (6 << (flags & 7) if flags & 0x80 else 0)
    parts = iter(range(MAX_PARTS))
    for _ in parts:
        introducer = bytes(encoded[offset : offset + 1])
        if introducer == b",":
            (left, top), (width, height) = _pair(encoded, offset + 1), _pair(encoded, offset + 5)
            yield left + width, top + height
            return
        if introducer != b"!":
            break
        offset += 2
        for _ in parts:
            size = int.from_bytes(encoded[offset : offset + 1])
            offset += 1 + size
            if not size:
                break
    yield None


def _bmp_wh(head: bytes) -> tuple[int, int] | None:
    if len(head) < 26:
        return None
    if _little(head[14:18]) == CORE_HEADER_BYTES:
        return _pair(head, 18)
    return _little(head[18:22]), abs(_little(head[22:26], signed=True))


def _webp_wh(head: bytes) -> tuple[int, int] | None:
    if len(head) < 30:
        return None
    match head[12:16]:
        case b"VP8X":  # libwebp rejects files whose frames exceed the canvas
            return _little(head[24:27]) + 1, _little(head[27:30]) + 1
        case b"VP8L":
            bits = _little(head[21:25])
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    width, height = _pair(head, 26)
    return width & 0x3FFF, height & 0x3FFF


def _pair(encoded: bytes | memoryview, offset: int) -> tuple[int, int]:
    return _little(encoded[offset : offset + 2]), _little(encoded[offset + 2 : offset + 4])


def _little(field: bytes | memoryview, signed: bool = False) -> int:
    return int.from_bytes(field, "little", signed=signed)


# Pixels that cost about as much to decode as a small photo costs in total, with inference.
PIXELS_PER_UNIT, PIXELS_PER_UNIT_OF_JPEG = 1_000_000, 8_000_000
# Cost of an image whose size only the decoder can determine.
UNKNOWN_COST = 16
# Images of at least this cost are decoded one at a time.
LARGE_COST = 8


def estimate_header_cost(header: ImageHeader | None, max_pixels: int | None = None) -> int:
    """Return the cost of an image in units of a small photo, at least 1.

    JPEGs are decoded at a fraction of their size; a pixel of another format costs about eight times as much.
    Each scan of a progressive JPEG passes over all pixels. A file rejected without decoding costs 1.
    """
    if header is None:
        return 1
    if header.size_wh is None:
        return UNKNOWN_COST
    width, height = header.size_wh
    if max_pixels and width * height > max_pixels:
        return 1
    per_unit = PIXELS_PER_UNIT_OF_JPEG if header.is_jpeg else PIXELS_PER_UNIT
    return max(1, width * height * header.passes // per_unit)

"""The size of an image from its first bytes, without decoding any part of the file."""

import simplejpeg

from nereid.gateway.failures import Failure

JPEG, TIFF = b"\xff\xd8\xff", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
# A JPEG's size follows its profiles and previews. If they are longer than this, the server checks the size.
HEAD_BYTES = 2**20
CORE_HEADER_BYTES = 12
# Pixels whose decoding costs about as much as a small photo with its inference.
PIXELS_PER_UNIT, PIXELS_PER_UNIT_OF_JPEG = 1_000_000, 8_000_000
# The size of a TIFF is anywhere in the file, that of some JPEGs beyond the head.
TIFF_WORK, UNKNOWN_JPEG_WORK = 16, 8
# Images of more units go one at a time.
LARGE_WORK = 8


def size_wh(encoded: bytes) -> tuple[int, int] | None:
    """Return width and height in pixels; None if the head has no size, and the server has to check.

    Source: PNG 11.2.2, GIF89a 18, BITMAPCOREHEADER, BITMAPINFOHEADER, RFC 9649 2.5-2.7; libjpeg-turbo reads
    JPEG. TIFF is left to the server: its directory may be anywhere in the file.
    """
    if encoded.startswith(JPEG):
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(encoded[:HEAD_BYTES], strict=False)
        except Exception:  # ValueError, KeyError of a rare subsampling, and more
            return None
        return width, height
    head = encoded[:32]
    if len(head) < 30:
        return None
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return _little(head[6:8]), _little(head[8:10])
    if head.startswith(b"BM"):
        if _little(head[14:18]) == CORE_HEADER_BYTES:
            return _little(head[18:20]), _little(head[20:22])
        return abs(_little(head[18:22], signed=True)), abs(_little(head[22:26], signed=True))
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return _webp_wh(head)
    return None


def work(encoded: bytes, max_pixels: int) -> int:
    """Return the cost of an image in units of a small photo, at least 1.

    JPEGs are decoded at a fraction of their size; a pixel of another format costs about eight times as much.
    An image of more than `max_pixels` is rejected without decoding, and costs 1.
    """
    is_jpeg = encoded.startswith(JPEG)
    if (found := size_wh(encoded)) is None:
        return UNKNOWN_JPEG_WORK if is_jpeg else TIFF_WORK if encoded.startswith(TIFF) else 1
    width, height = found
    if width * height > max_pixels:
        return 1
    return max(1, width * height // (PIXELS_PER_UNIT_OF_JPEG if is_jpeg else PIXELS_PER_UNIT))


def check(encoded: bytes, max_pixels: int, max_side_px: int) -> None:
    """Reject an image that is too large according to its head.

    Raises:
        Failure: `invalid_image`, with the limit and the received size.
    """
    if (found := size_wh(encoded)) is None:
        return
    width, height = found
    if width * height > max_pixels or max(width, height) > max_side_px:
        raise Failure(
            "invalid_image",
            f"{width}×{height} pixels; at most {max_pixels} pixels and {max_side_px} a side are allowed",
        )


def _webp_wh(head: bytes) -> tuple[int, int] | None:
    match head[12:16]:
        case b"VP8X":
            return _little(head[24:27]) + 1, _little(head[27:30]) + 1
        case b"VP8L":
            bits = _little(head[21:25])
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            return _little(head[26:28]) & 0x3FFF, _little(head[28:30]) & 0x3FFF
    return None


def _little(field: bytes, signed: bool = False) -> int:
    return int.from_bytes(field, "little", signed=signed)

"""What decoding an image costs, before it is decoded."""

from nereid.gateway.failures import Failure
from nereid.imaging.formats.size import read_size

# Pixels whose decoding costs about as much as a small photo with its inference.
PIXELS_PER_UNIT, PIXELS_PER_UNIT_OF_JPEG = 1_000_000, 8_000_000
# Of an image whose size only the decoder finds.
UNKNOWN_WORK = 16
# Images of so many units go one at a time.
LARGE_WORK = 8


def work(encoded: bytes | memoryview, max_pixels: int) -> int:
    """Return the cost of an image in units of a small photo, at least 1.

    JPEGs are decoded at a fraction of their size; a pixel of another format costs about eight times as much,
    and so does each scan of a progressive JPEG. What is rejected without decoding costs 1.
    """
    if (found := read_size(encoded)) is None:
        return 1
    if found.size_wh is None:
        return UNKNOWN_WORK
    width, height = found.size_wh
    if width * height > max_pixels:
        return 1
    per_unit = PIXELS_PER_UNIT_OF_JPEG if found.is_jpeg else PIXELS_PER_UNIT
    return max(1, width * height * found.passes // per_unit)


def check(encoded: bytes | memoryview, max_pixels: int, max_side_px: int) -> None:
    """Reject an image that is too large according to its structure.

    Raises:
        Failure: `invalid_image`, with the limit and the received size.
    """
    if (found := read_size(encoded)) is None or found.size_wh is None:
        return
    width, height = found.size_wh
    if width * height > max_pixels or max(width, height) > max_side_px:
        raise Failure(
            "invalid_image",
            f"{width}×{height} pixels; at most {max_pixels} pixels and {max_side_px} a side are allowed",
        )

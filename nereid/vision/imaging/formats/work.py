"""What decoding an image costs, before it is decoded."""

from nereid.vision.imaging.formats.size import FileSize, read_size

# Pixels whose decoding costs about as much as a small photo with its inference.
PIXELS_PER_UNIT, PIXELS_PER_UNIT_OF_JPEG = 1_000_000, 8_000_000
# Of an image whose size only the decoder finds.
UNKNOWN_WORK = 16
# Images of so many units go one at a time.
LARGE_WORK = 8


def work(encoded: bytes | memoryview, max_pixels: int | None = None) -> int:
    """Return the cost of an image in units of a small photo, at least 1.

    JPEGs are decoded at a fraction of their size; a pixel of another format costs about eight times as much.
    Each scan of a progressive JPEG passes over all pixels. What is rejected without decoding costs 1.
    """
    return work_of(read_size(encoded), max_pixels)


def work_of(found: FileSize | None, max_pixels: int | None = None) -> int:
    """Return the cost of an image whose structure was read, as `work` does."""
    if found is None:
        return 1
    if found.size_wh is None:
        return UNKNOWN_WORK
    width, height = found.size_wh
    if max_pixels and width * height > max_pixels:
        return 1
    per_unit = PIXELS_PER_UNIT_OF_JPEG if found.is_jpeg else PIXELS_PER_UNIT
    return max(1, width * height * found.passes // per_unit)

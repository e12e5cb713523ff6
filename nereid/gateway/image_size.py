"""Sizes of images, before they are decoded."""

from nereid.gateway.failures import Failure
from nereid.vision.imaging.formats.size import FileSize


def check(found: FileSize | None, max_pixels: int, max_side_px: int) -> None:
    """Reject an image that is too large according to its structure.

    Raises:
        Failure: `invalid_image`, with the limit and the received size.
    """
    if found is None or found.size_wh is None:
        return
    width, height = found.size_wh
    if width * height > max_pixels or max(width, height) > max_side_px:
        raise Failure(
            "invalid_image",
            f"{width}×{height} pixels; at most {max_pixels} pixels and {max_side_px} a side are allowed",
        )

"""The segments of a JPEG. Source: ITU-T T.81, annex B."""

import re
from collections.abc import Iterator
from itertools import count, islice

from nereid.serving_errors import InvalidImage

MAGIC, SCAN, END = b"\xff\xd8\xff", b"\xff\xda", b"\xff\xd9"
# Encoders write about ten scans, each of which costs a pass over the whole image, and few segments.
MAX_SCANS = 32
MAX_SEGMENTS = 4_096
START_OF_SCAN, APP1 = 0xDA, 0xE1
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
SEQUENTIAL = frozenset({0xC0, 0xC1})
# Markers, except those without a length, which occur between and inside scans.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
_SCAN = re.compile(SCAN)
_WITHOUT_SUCCESSOR = frozenset({0xD8, 0xD9})
# Bytes between segments that the search for the frame passes over: they take time, and cameras write few.
_MAX_JUNK_BYTES = 2**16


def segments(encoded: bytes | memoryview, max_junk_bytes: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield marker and payload of each segment, to the end of the image.

    Args:
        max_junk_bytes: how many bytes between segments may follow each other or be pixels; None for no limit.

    Raises:
        InvalidImage: it has too many segments, each of which costs time.
    """
    place, left = len(MAGIC) - 1, len(encoded) if max_junk_bytes is None else max_junk_bytes
    for number in count():
        found = _MARKER.search(encoded, place, place + left + 2)
        if not found or (marker := found[0][1]) in _WITHOUT_SUCCESSOR:
            return
        if number == MAX_SEGMENTS:
            raise InvalidImage(
                f"expected at most {MAX_SEGMENTS} segments in a JPEG, got {number + 1} or more"
            )
        left -= found.start() - place
        place = found.end() + max(2, int.from_bytes(encoded[found.end() : found.end() + 2]))
        yield marker, bytes(encoded[found.end() + 2 : place])


def size_and_scans(encoded: bytes | memoryview) -> tuple[tuple[int, int], int] | None:
    """Return width and height in pixels, and how many passes over them the scans cost, at most `MAX_SCANS`.

    None if there is no frame in front of the first scan, or hidden by much that is no segment.

    Raises:
        InvalidImage: it has too many segments.
    """
    size_wh, components = None, None
    for marker, payload in segments(encoded, _MAX_JUNK_BYTES):
        if marker in START_OF_FRAME:
            height, width = int.from_bytes(payload[1:3]), int.from_bytes(payload[3:5])
            size_wh = max(size_wh or (0, 0), (width, height), key=lambda size: size[0] * size[1])
            components = payload[5:6] if marker in SEQUENTIAL else None
        elif marker == START_OF_SCAN:
            is_only = payload[:1] == components  # it has all components, so the decoder reads no other
            scans = 1 if is_only else sum(1 for _ in islice(_SCAN.finditer(encoded), MAX_SCANS))
            return (size_wh, scans) if size_wh else None
    return None

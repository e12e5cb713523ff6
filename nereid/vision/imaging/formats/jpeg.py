"""The segments of a JPEG. Source: ITU-T T.81, annex B."""

import re
from collections.abc import Iterator
from itertools import count, islice
from math import prod

from nereid.base.errors import InvalidImage

MAGIC = b"\xff\xd8\xff"
# Encoders write few segments and about ten scans; each scan costs a pass over the whole image.
MAX_SCANS = 32
MAX_SEGMENTS = 4_096
START_OF_IMAGE, END_OF_IMAGE, START_OF_SCAN = 0xD8, 0xD9, 0xDA
APP0, APP1, APP14, APP15, COMMENT = 0xE0, 0xE1, 0xEE, 0xEF, 0xFE
# In APP0's payload, the major revision follows this; in APP14's, six bytes and the transform do.
JFIF, ADOBE = b"JFIF\0", b"Adobe"
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
SEQUENTIAL = frozenset({0xC0, 0xC1})
# Markers, except those without a length that occur between and inside scans.
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")
_SCAN = re.compile(rb"\xff\xda")
# Junk bytes in total that `size_and_scans` skips; skipping takes time, and cameras write few.
_MAX_JUNK_BYTES = 2**16


def segments(encoded: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield the marker and the payload's offset and bytes of each segment, up to the end marker, without one.

    Raises:
        InvalidImage: it has more than `MAX_SEGMENTS`.
    """
    offset = len(MAGIC) - 1
    for number in count():
        match = _MARKER.search(encoded, offset)
        if not match or (marker := match[0][1]) == START_OF_IMAGE:
            return
        if marker == END_OF_IMAGE:
            yield marker, match.end(), b""
            return
        if number == MAX_SEGMENTS:
            raise InvalidImage(
                f"expected at most {MAX_SEGMENTS} segments in a JPEG, got {number + 1} or more"
            )
        begin = match.end() + 2
        offset = match.end() + max(2, int.from_bytes(encoded[begin - 2 : begin]))
        yield marker, begin, encoded[begin:offset]


def without_extras(encoded: bytes) -> bytes:
    """Return a JPEG without the parts of its header that change no pixel, such as profiles, or junk.

    After warning about such a part, the decoder no longer reports missing image data.
    """
    frames = (payload for marker, _, payload in segments(encoded) if marker in START_OF_FRAME)
    # The decoder assumes these for one that it does not know. Source: libjpeg, jdapimin.c.
    transform = b"\2" if next(frames, b"")[5:6] == b"\4" else b"\1"
    parts = [encoded[: len(MAGIC) - 1]]
    for marker, begin, payload in segments(encoded):
        if marker == START_OF_SCAN:
            parts.append(encoded[begin - 4 :])
            break
        if marker == APP0 and payload.startswith(JFIF):
            payload = JFIF + b"\1" + payload[6:]
        elif marker == APP14 and payload.startswith(ADOBE) and payload[11:12] not in (b"", b"\0"):
            payload = payload[:11] + transform
        elif APP0 <= marker <= APP15 or marker == COMMENT:
            continue
        parts += bytes((0xFF, marker)), (len(payload) + 2).to_bytes(2), payload
    return b"".join(parts)


def size_and_scans(encoded: bytes | memoryview) -> tuple[tuple[int, int], int] | None:
    """Return (width, height) in pixels, and the number of passes over them, at most `MAX_SCANS`.

    None if no frame precedes the first scan, or too much junk or too many segments precede it.
    """
    size_wh, offset = (0, 0), len(MAGIC) - 1
    components: bytes | memoryview | None = None
    junk_end = offset + _MAX_JUNK_BYTES
    for _ in range(MAX_SEGMENTS):
        match = _MARKER.search(encoded, offset, junk_end)
        if not match:
            break
        marker, begin = match[0][1], match.end() + 2
        length = max(2, int.from_bytes(encoded[begin - 2 : begin]))
        if marker in START_OF_FRAME and len(head := encoded[begin : begin + 6]) == 6:
            height, width = int.from_bytes(head[1:3]), int.from_bytes(head[3:5])
            size_wh = max(size_wh, (width, height), key=prod)
            components = head[5:] if marker in SEQUENTIAL else None
        elif marker == START_OF_SCAN:
            # If a scan has all components, the decoder reads no other.
            is_only = encoded[begin : begin + 1] == components
            scans = 1 if is_only else sum(1 for _ in islice(_SCAN.finditer(encoded), MAX_SCANS))
            return (size_wh, scans) if all(size_wh) else None
        junk_end += length + 2
        offset = begin - 2 + length
    return None

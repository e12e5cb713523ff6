"""Preparation times and header facts of an image, and a type for images that are not traffic."""

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # not every backend needs image libraries
    from nereid.vision.imaging.decode import EncodedImage


class ProbeImage(bytes):
    """The encoded image of a health check or warm-up; its signals are not measured."""


class ImageTimes:
    """Preparation times of an image, in ns since the Unix epoch, and its format and size."""

    __slots__ = ("_begin_ns", "_decoded_ns", "_end_ns", "format", "size_bytes", "size_wh")

    def __init__(self) -> None:
        self._begin_ns = self._decoded_ns = self._end_ns = self.size_bytes = 0
        self.format, self.size_wh = "unknown", (0, 0)

    def record_start(self, encoded: bytes) -> None:
        """Record the start and the file size."""
        self._begin_ns, self.size_bytes = time.time_ns(), len(encoded)

    def record_header(self, image: "EncodedImage") -> None:
        """Record the format and size from the header."""
        self.format, self.size_wh = image.format, image.size_wh

    def record_decoding(self) -> None:
        """Record the end of decoding."""
        self._decoded_ns = time.time_ns()

    def record_end(self, decoded_ns: int = 0, end_ns: int = 0) -> None:
        """Record the end of the preparation.

        Args:
            decoded_ns, end_ns: when decoding and preparation ended, if measured by a device.
        """
        self._decoded_ns = decoded_ns or self._decoded_ns
        self._end_ns = end_ns or time.time_ns()

    def spans(self) -> list[dict[str, Any]]:
        """Return the spans `decode` and `resize`; only the first if decoding failed."""
        attributes = {
            "format": self.format,
            "bytes": self.size_bytes,
            "width": self.size_wh[0],
            "height": self.size_wh[1],
        }
        decoded_ns = self._decoded_ns or self._end_ns
        spans = [{"name": "decode", "begin": self._begin_ns, "end": decoded_ns, "about": attributes}]
        if self._decoded_ns:
            spans.append({"name": "resize", "begin": decoded_ns, "end": self._end_ns, "about": {}})
        return spans

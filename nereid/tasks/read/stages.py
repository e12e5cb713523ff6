"""The stages of reading, their times, and the metrics of the `text_reader` backend."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nereid.backends.triton.metrics import DURATIONS_S
from nereid.base.prometheus_text import MetricSpec, counter, counter_histogram

# Cause and next step if a stage is slow.
MEANINGS = {
    "barcodes": ("searching the images for barcodes is slow", "send smaller images"),
    "detect": ("searching the images for text is slow", "send smaller images, or nereid tune"),
    "boxes": ("finding the boxes around the text is slow", "send images with less noise, or nereid tune"),
    "crops": ("cutting the lines out of the images is slow", "send images with fewer lines, or nereid tune"),
    "direction": ("finding the direction of the lines is slow", "nereid tune"),
    "recognise": (
        "recognising the lines is slow",
        "look at the number of lines; nereid tune, or a smaller recogniser",
    ),
    "fields": ("searching the lines for fields is slow", "look at the number of lines and fields"),
}

# Metrics by name without the prefix.
PREFIX, LABELS = "nereid_reader_", ("model", "version")
FAMILIES: Mapping[str, MetricSpec] = {
    "stage_duration_seconds": counter_histogram(
        "Seconds of a stage for one image; the recognition of lines of several images counts for each",
        (*DURATIONS_S, 4.0, 8.0),
        "stage",
    ),
    "lines": counter_histogram("Lines of text of one image", (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)),
    "missing_fields_total": counter(
        "Images on which a required field was not found, or its checksum does not hold", "field"
    ),
    "rejected_total": counter("Rejected requests, by the code of the error", "reason"),
}
METRICS = PREFIX, LABELS, FAMILIES


class StageTimes:
    """When the stages of one image ran, in ns since the Unix epoch, and facts from its header."""

    __slots__ = ("_runs", "attributes")

    def __init__(self) -> None:
        self._runs: list[tuple[str, int, int]] = []
        self.attributes: dict[str, Any] = {}

    def record_header(self, image_format: str, size_wh: tuple[int, int]) -> None:
        """Record facts from the header."""
        width, height = size_wh
        self.attributes |= {"format": image_format, "width": width, "height": height}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record one run of a stage while the context lasts; a stage may run more than once."""
        begin_ns = time.time_ns()
        try:
            yield
        finally:
            self.add(name, begin_ns, time.time_ns())

    def add(self, name: str, begin_ns: int, end_ns: int) -> None:
        """Record a run of a stage shared by several images."""
        self._runs.append((name, begin_ns, end_ns))

    def milliseconds(self) -> dict[str, float]:
        """Return the time of each stage that ran; shared stages count in full."""
        times_ms: dict[str, float] = {}
        for name, begin_ns, end_ns in self._runs:
            times_ms[name] = times_ms.get(name, 0.0) + (end_ns - begin_ns) / 1e6
        return times_ms

    def spans(self) -> list[dict[str, Any]]:
        """Return the stage runs as spans; the first one carries the facts about the image."""
        return [
            {"name": name, "begin": begin_ns, "end": end_ns, "about": {} if index else self.attributes}
            for index, (name, begin_ns, end_ns) in enumerate(self._runs)
        ]

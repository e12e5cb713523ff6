"""Metrics of the backend `text_reader`, by their names without the prefix."""

from collections.abc import Mapping

from nereid.backends.triton.metrics import DURATIONS_S, MetricKind

PREFIX, LABELS = "nereid_reader_", ("model", "version")
FAMILIES: Mapping[str, MetricKind] = {
    "stage_duration_seconds": MetricKind(
        "TALLY",
        "Seconds of a stage for one image; the recognition of lines of several images counts for each",
        (*DURATIONS_S, 4.0, 8.0),
        labels=("stage",),
    ),
    "lines": MetricKind("TALLY", "Lines of text of one image", (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)),
    "missing_fields_total": MetricKind(
        "COUNTER",
        "Images on which a required field was not found, or its checksum does not hold",
        labels=("field",),
    ),
    "rejected_total": MetricKind(
        "COUNTER", "Rejected requests, by the code of the error", labels=("reason",)
    ),
}
METRICS = PREFIX, LABELS, FAMILIES

"""The recorded increase of all signals over the last hours; bounded."""

import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct

from nereid.backends.routing.reference_file import CLASS
from nereid.backends.triton.metrics import IMAGE_METRICS, IMAGE_PREFIX, ROUTE_PREFIX, ROUTE_QUALITY_METRICS
from nereid.base.prometheus_text import BUCKET, MetricSamples, without_lag

OUTPUT_SIGNALS = tuple(
    name for name, spec in ROUTE_QUALITY_METRICS.items() if spec.kind == "COUNTER_HISTOGRAM"
)
INPUT_SIGNALS = tuple(IMAGE_METRICS)
SIGNALS = (*OUTPUT_SIGNALS, CLASS, *INPUT_SIGNALS)
BOUNDS: Mapping[str, tuple[float, ...]] = {
    name: spec.buckets for name, spec in {**ROUTE_QUALITY_METRICS, **IMAGE_METRICS}.items() if spec.buckets
}
PREDICTED, SHADOWS = f"{ROUTE_PREFIX}predicted_total", f"{ROUTE_PREFIX}shadow_requests_total"
# Prefixes of all metrics with signals.
PREFIXES = (
    *(f"{ROUTE_PREFIX}{signal}{BUCKET}" for signal in OUTPUT_SIGNALS),
    *(f"{IMAGE_PREFIX}{signal}{BUCKET}" for signal in INPUT_SIGNALS),
    *(PREDICTED, SHADOWS),
)
RECORDING_FILE = "drift_recording.json"
# Six hours at one slot a minute.
MAX_SLOTS = 360
# More series than 16 variants have; a page with more is not recorded completely.
MAX_SERIES = 1024
# Seconds until a route counts the classes of a new reference, and has reported all others.
CLASSES_DELAY_S = 6.0
SEPARATOR = "|"
# By series, the counts by bucket (its upper bound), by class, or by outcome; without zeros. The count of a
# bucket that lags behind a smaller one is negative, and a later slot makes up for it.
SeriesCounts: TypeAlias = Mapping[str, Mapping[str, int]]


def route_series(route: str, variant: str, version: str, signal: str) -> str:
    """Return the series name for a signal of a variant's responses."""
    return SEPARATOR.join(("route", route, variant, version, signal))


def image_series(model: str, version: int | str, signal: str) -> str:
    """Return the series name for a signal of a model's images."""
    return SEPARATOR.join(("image", model, str(version), signal))


def shadow_series(route: str, shadow: str) -> str:
    """Return the series name for a shadow's outcomes."""
    return SEPARATOR.join(("shadow", route, shadow))


def series_counts(samples: MetricSamples) -> SeriesCounts:
    """Return the signals in an increase of samples, summed over a route's instances."""
    increase: dict[str, dict[str, int]] = {}

    def add(series: str, counts: Mapping[str, float]) -> None:
        if len(increase) < MAX_SERIES or series in increase:
            for bucket, count in counts.items():
                if count:
                    # Interned, because each slot of the history has the same names.
                    increase.setdefault(sys.intern(series), {})[sys.intern(bucket)] = int(count)

    for signal in OUTPUT_SIGNALS:
        variants = samples.buckets(ROUTE_PREFIX + signal, "route", "variant", "version")
        for (route, variant, version), counts in variants.items():
            add(route_series(route, variant, version, signal), _by_name(counts))
    for signal in INPUT_SIGNALS:
        for (model, version), counts in samples.buckets(IMAGE_PREFIX + signal, "model", "version").items():
            add(image_series(model, version, signal), _by_name(counts))
    classes = samples.sums(PREDICTED, "route", "variant", "version", "class")
    for (route, variant, version, index), count in classes.items():
        add(route_series(route, variant, version, CLASS), {index: count})
    for (route, shadow, outcome), count in samples.sums(SHADOWS, "route", "shadow", "outcome").items():
        add(shadow_series(route, shadow), {outcome: count})
    return increase


def _by_name(counts: Mapping[float, float]) -> dict[str, float]:
    return {bucket_name(bound): count for bound, count in counts.items()}


def bucket_name(bound: float) -> str:
    """Return the name of a bucket, as on the metrics page."""
    return "+Inf" if bound == inf else f"{bound:g}"


def histogram(counts: Mapping[str, int], signal: str) -> list[int]:
    """Return the counts of a signal's series in the order of its buckets."""
    buckets = {bound: counts.get(bucket_name(bound), 0) for bound in (*BOUNDS[signal], inf)}
    return [int(count) for count in without_lag(buckets).values()]


def class_counts(counts: Mapping[str, int], classes: Sequence[int]) -> list[int]:
    """Return the counts of the classes, and the count of all others."""
    named = [counts.get(str(index), 0) for index in classes]
    return [*named, sum(counts.values()) - sum(named)]


class RecordedInterval(Struct, frozen=True):
    """The increase of the `seconds` before `at`, in Unix time."""

    at: float
    seconds: float
    increase: SeriesCounts = msgspec.field(name="growth")


class History:
    """The newest slots, oldest first; appending one beyond the limit drops the oldest."""

    def __init__(self, max_slots: int = MAX_SLOTS) -> None:
        self.slots: deque[RecordedInterval] = deque(maxlen=max_slots)

    def window(self, now: float, seconds: float, stored: float = -inf) -> tuple[SeriesCounts, float]:
        """Return the increase in the slots that ended in the last `seconds`, and the seconds they cover.

        Classes count only after a reference was `stored`. Before, the route counted other classes.
        """
        total: dict[str, Counter[str]] = {}
        covered = 0.0
        for slot in self.slots:
            if now - slot.at >= seconds:
                continue
            covered += slot.seconds
            has_classes = slot.at - slot.seconds >= stored + CLASSES_DELAY_S
            for series, counts in slot.increase.items():
                if has_classes or not series.endswith(SEPARATOR + CLASS):
                    total.setdefault(series, Counter()).update(counts)
        return total, covered

    def last_increase(self, prefix: str) -> float | None:
        """Return when a series with this prefix last grew, in Unix time; None if it never did."""
        for slot in reversed(self.slots):
            if any(
                series.startswith(prefix) and sum(new.values()) > 0 for series, new in slot.increase.items()
            ):
                return slot.at
        return None

    def store(self, folder: Path) -> None:
        """Write the slots to a run directory, for other commands."""
        replace_unsynced(folder / RECORDING_FILE, msgspec.json.encode(list(self.slots)))

    @classmethod
    def load(cls, folder: Path) -> "History":
        """Read the slots of a run directory; none if nothing was recorded."""
        history = cls()
        try:
            text = (folder / RECORDING_FILE).read_bytes()
        except FileNotFoundError:
            return history
        history.slots.extend(msgspec.json.decode(text, type=list[RecordedInterval]))
        return history


def replace_unsynced(path: Path, content: bytes) -> None:
    """Replace a file of a run directory atomically; it does not outlive its server, so it is not synced."""
    new = path.with_name(f".{path.name}")
    new.touch(mode=0o600)
    new.write_bytes(content)
    new.replace(path)

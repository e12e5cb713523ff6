"""Gateway metrics: for Prometheus, with bounded label values, and the last minute for the web page."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from msgspec import Struct
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.multiprocess import MultiProcessCollector

from nereid.gateway.admission import Admission

PREFIX = "nereid_gateway_"
# Each bound doubles the previous one; 0.125 replaces 0.128 so that later bounds include whole seconds.
STAGE_BUCKETS_S = *(0.001 * 2**step for step in range(7)), *(0.125 * 2**step for step in range(9))
MAX_VARIANTS = 32
OTHER_LABEL = "other"
WINDOW_S = 60
# 0.5 ms to 85 s, each bound 15 % above the previous one, so a quantile's error is below 15 %.
LATENCY_BUCKETS_S = tuple(0.0005 * 1.15**step for step in range(87))
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4.encode()


class Metrics:
    """All metrics of one gateway.

    Args:
        load: has the values of the gauges `in_flight`, `waiting` and `limit`.
        is_shared: whether values are summed over all workers; `refresh` then updates the gauges.
    """

    def __init__(self, load: Admission, is_shared: bool = False) -> None:
        self._load, self._is_shared = load, is_shared
        self.registry = CollectorRegistry(auto_describe=True)
        labels = ("endpoint", "model", "variant", "outcome")
        self._counters = {
            unit: PrometheusCounter(
                f"{PREFIX}{unit}", f"{unit.capitalize()} by outcome", labels, registry=self.registry
            )
            for unit in ("requests", "images")
        }
        self._feedback = PrometheusCounter(
            f"{PREFIX}feedback",
            "Feedback about answers: correct or wrong",
            ("model", "variant", "result"),
            registry=self.registry,
        )
        self._stages = Histogram(
            f"{PREFIX}stage_seconds",
            "Duration of a stage: receive, admission, inference, or total of the request",
            ("endpoint", "model", "variant", "stage", "outcome"),
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self._gauges = {
            name: Gauge(f"{PREFIX}{name}", text, registry=self.registry, multiprocess_mode="livesum")
            for name, text in (
                ("in_flight", "Images in flight to the server"),
                ("waiting", "Images in the queue"),
                ("limit", "Limit of images in flight"),
            )
        }
        self._variants: set[str] = {""}
        # prometheus_client's `labels` costs more than the observation itself.
        self._observe: dict[tuple[str, ...], Callable[[float], None]] = {}
        self._count: dict[tuple[str, ...], Callable[[], None]] = {}

    def variant_label(self, name: str) -> str:
        """Return the label for a variant that has answered; variants beyond a limit share one label."""
        if name not in self._variants:
            if len(self._variants) > MAX_VARIANTS:
                return OTHER_LABEL
            self._variants.add(name)
        return name

    def count(
        self,
        unit: Literal["requests", "images"],
        endpoint: str,
        model: str,
        variant: str,
        outcome: str,
        stages_s: Mapping[str, float],
    ) -> None:
        """Count a finished request, or one image of it, and record its stages."""
        labels = unit, endpoint, model, variant, outcome
        if (count := self._count.get(labels)) is None:
            count = self._count[labels] = self._counters[unit].labels(*labels[1:]).inc
        count()
        for stage, seconds in stages_s.items():
            stage_labels = endpoint, model, variant, stage, outcome
            if (observe := self._observe.get(stage_labels)) is None:
                observe = self._observe[stage_labels] = self._stages.labels(*stage_labels).observe
            observe(seconds)

    def count_feedback(self, model: str, variant: str, is_correct: bool) -> None:
        """Count feedback on an answer as `correct` or `wrong`; both series exist from then on."""
        for result, count in (("correct", is_correct), ("wrong", not is_correct)):
            self._feedback.labels(model, variant, result).inc(count)

    def refresh(self) -> None:
        """Update the gauges."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(self._load, name))

    def page(self) -> bytes:
        """Return the page in Prometheus text format, for all workers together."""
        self.refresh()
        registry = self.registry
        if self._is_shared:
            MultiProcessCollector(registry := CollectorRegistry())  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class VariantLive(Struct):
    """One variant in the last minute; `share` is its fraction of the answered images."""

    variant: str
    share: float
    requests_per_s: float
    p50_ms: float
    p99_ms: float


class Second(Struct):
    """One second, `age_s` seconds ago; the quantiles are None if no image was answered."""

    age_s: int
    requests_per_s: float
    p50_ms: float | None
    p99_ms: float | None


class LiveState(Struct):
    """The load of the last minute; `outcomes` counts images.

    `is_ready` says whether the model classified a photo within the last few seconds; None if unknown.
    """

    window_s: int
    requests_per_s: float
    in_flight: int
    limit: int
    outcomes: dict[str, int]
    variants: list[VariantLive]
    history: list[Second]
    is_ready: bool | None
    why_not_ready: str


class SecondCounts(Struct):
    """The counts of one second: outcomes, and latencies by variant and bucket."""

    second: int
    outcomes: dict[str, int] = {}
    latencies: dict[str, dict[int, int]] = {}


class LoadWindow(Struct):
    """The counts of the last minute, and the monotonic-clock second in which counting began."""

    began: int
    seconds: list[SecondCounts]


class RecentLoad:
    """Images of the last minute.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = int(clock())
        # One more entry for the current second.
        self._entries = [SecondCounts(-1) for _ in range(WINDOW_S + 1)]

    def record(self, outcome: str, variant: str, seconds: float) -> None:
        """Record an image's outcome; only answered images have a latency."""
        second = int(self._clock())
        entry = self._entries[second % len(self._entries)]
        if entry.second != second:
            entry = self._entries[second % len(self._entries)] = SecondCounts(second)
        entry.outcomes[outcome] = entry.outcomes.get(outcome, 0) + 1
        if outcome == "ok":
            counts, bucket = entry.latencies.setdefault(variant, {}), bisect_left(LATENCY_BUCKETS_S, seconds)
            counts[bucket] = counts.get(bucket, 0) + 1

    def window(self) -> LoadWindow:
        """Return the counts of the last minute, excluding the current second."""
        now = int(self._clock())
        return LoadWindow(
            self._began, [entry for entry in self._entries if now - WINDOW_S <= entry.second < now]
        )

    def state(
        self,
        in_flight: int,
        limit: int,
        is_ready: bool | None = None,
        why_not_ready: str = "",
        other_windows: Sequence[LoadWindow] = (),
    ) -> LiveState:
        """Return the last minute, excluding the current second.

        Args:
            in_flight, limit, is_ready, why_not_ready: fields of the state.
            other_windows: the windows of the gateway's other workers, for the same model.
        """
        now, windows = int(self._clock()), [self.window(), *other_windows]
        entries = _by_second(windows, range(now - WINDOW_S, now))
        length_s = max(1, min(WINDOW_S, now - min(window.began for window in windows)))
        outcomes = _sum(entry.outcomes for entry in entries.values())
        names = sorted({name for entry in entries.values() for name in entry.latencies})
        counts_by_variant = {
            name: _sum(entry.latencies.get(name, {}) for entry in entries.values()) for name in names
        }
        answered = sum(counts.total() for counts in counts_by_variant.values())
        variants = [
            VariantLive(
                name,
                round(counts.total() / answered, 4),
                round(counts.total() / length_s, 2),
                _quantile_ms(counts, 0.5),
                _quantile_ms(counts, 0.99),
            )
            for name, counts in counts_by_variant.items()
        ]
        seconds = range(now - length_s, now)
        history = [_second(now, entries.get(second, SecondCounts(second))) for second in seconds]
        per_s = round(sum(outcomes.values()) / length_s, 2)
        load = per_s, in_flight, limit, dict(outcomes)
        return LiveState(WINDOW_S, *load, variants, history, is_ready, why_not_ready)


def _by_second(windows: Iterable[LoadWindow], seconds: range) -> dict[int, SecondCounts]:
    """Sum the counts of all workers for these seconds; other workers' reports may be a few seconds old."""
    totals: dict[int, SecondCounts] = {}
    for entry in (entry for window in windows for entry in window.seconds if entry.second in seconds):
        total = totals.setdefault(entry.second, SecondCounts(entry.second))
        total.outcomes = _sum((total.outcomes, entry.outcomes))
        for variant, counts in entry.latencies.items():
            total.latencies[variant] = _sum((total.latencies.get(variant, {}), counts))
    return totals


def _second(now: int, entry: SecondCounts) -> Second:
    counts = _sum(entry.latencies.values())
    p50_ms, p99_ms = (_quantile_ms(counts, share) if counts else None for share in (0.5, 0.99))
    return Second(now - entry.second, float(sum(entry.outcomes.values())), p50_ms, p99_ms)


def _sum(counters: Iterable[Mapping[Any, int]]) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _quantile_ms(counts: Counter[int], share: float) -> float:
    """Return the upper bound of the bucket that contains a quantile."""
    buckets = sorted(counts)
    below = list(accumulate(counts[bucket] for bucket in buckets))
    bucket = buckets[bisect_left(below, share * below[-1])]
    return round(LATENCY_BUCKETS_S[min(bucket, len(LATENCY_BUCKETS_S) - 1)] * 1e3, 2)

"""Rates, latencies and outcomes of the last minute, second by second."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from msgspec import Struct

WINDOW_S = 60
# 0.5 ms to 85 s, each bound 15 % above the last: the error of a quantile is less.
BOUNDS_S = tuple(0.0005 * 1.15**step for step in range(87))


class VariantLive(Struct):
    """One variant in the last minute; `share` is its share of the answered images."""

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

    `is_ready` is whether the model classified a photo a few seconds ago, None while that is unknown.
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


class _SecondCounts:
    """The counts of one second: outcomes, and latencies by variant."""

    __slots__ = ("latencies", "outcomes", "second")

    def __init__(self, second: int) -> None:
        self.second = second
        self.outcomes: Counter[str] = Counter()
        self.latencies: dict[str, Counter[int]] = {}


class Live:
    """Images of the last minute.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = int(clock())
        # One more entry for the present second.
        self._entries = [_SecondCounts(-1) for _ in range(WINDOW_S + 1)]

    def note(self, outcome: str, variant: str, seconds: float) -> None:
        """Record the outcome of an image; only answered images have a latency."""
        second = int(self._clock())
        entry = self._entries[second % len(self._entries)]
        if entry.second != second:
            entry = self._entries[second % len(self._entries)] = _SecondCounts(second)
        entry.outcomes[outcome] += 1
        if outcome == "ok":
            entry.latencies.setdefault(variant, Counter())[bisect_left(BOUNDS_S, seconds)] += 1

    def state(
        self, in_flight: int, limit: int, is_ready: bool | None = None, why_not_ready: str = ""
    ) -> LiveState:
        """Return the last minute, without the second that has just begun."""
        now = int(self._clock())
        entries = {entry.second: entry for entry in self._entries if now - WINDOW_S <= entry.second < now}
        length_s = max(1, min(WINDOW_S, now - self._began))
        outcomes = _sum(entry.outcomes for entry in entries.values())
        names = sorted({name for entry in entries.values() for name in entry.latencies})
        of_variant = {
            name: _sum(entry.latencies.get(name, Counter()) for entry in entries.values()) for name in names
        }
        answered = sum(counts.total() for counts in of_variant.values())
        variants = [
            VariantLive(
                name,
                round(counts.total() / answered, 4),
                round(counts.total() / length_s, 2),
                _quantile_ms(counts, 0.5),
                _quantile_ms(counts, 0.99),
            )
            for name, counts in of_variant.items()
        ]
        seconds = range(now - length_s, now)
        history = [_second(now, entries.get(second, _SecondCounts(second))) for second in seconds]
        per_s = round(sum(outcomes.values()) / length_s, 2)
        load = per_s, in_flight, limit, dict(outcomes)
        return LiveState(WINDOW_S, *load, variants, history, is_ready, why_not_ready)


def _second(now: int, entry: _SecondCounts) -> Second:
    counts = _sum(entry.latencies.values())
    p50_ms, p99_ms = (_quantile_ms(counts, share) if counts else None for share in (0.5, 0.99))
    return Second(now - entry.second, float(entry.outcomes.total()), p50_ms, p99_ms)


def _sum(counters: Iterable[Counter[Any]]) -> Counter[Any]:
    total: Counter[Any] = Counter()
    for counter in counters:
        total.update(counter)
    return total


def _quantile_ms(counts: Counter[int], share: float) -> float:
    """Return the upper bound of the bucket in which a quantile lies."""
    buckets = sorted(counts)
    below = list(accumulate(counts[bucket] for bucket in buckets))
    bucket = buckets[bisect_left(below, share * below[-1])]
    return round(BOUNDS_S[min(bucket, len(BOUNDS_S) - 1)] * 1e3, 2)

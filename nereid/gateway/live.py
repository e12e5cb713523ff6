"""Rates, latencies and outcomes of the last minute, second by second."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class SecondCounts(Struct):
    """The counts of one second: outcomes, and latencies by variant and bucket."""

    second: int
    outcomes: dict[str, int] = {}
    latencies: dict[str, dict[int, int]] = {}


class LastMinute(Struct):
    """The counts of the last minute, and the second of the monotonic clock in which they began."""

    began: int
    seconds: list[SecondCounts]


class Live:
    """Images of the last minute.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = int(clock())
        # One more entry for the present second.
        self._entries = [SecondCounts(-1) for _ in range(WINDOW_S + 1)]

    def note(self, outcome: str, variant: str, seconds: float) -> None:
        """Record the outcome of an image; only answered images have a latency."""
        second = int(self._clock())
        entry = self._entries[second % len(self._entries)]
        if entry.second != second:
            entry = self._entries[second % len(self._entries)] = SecondCounts(second)
        entry.outcomes[outcome] = entry.outcomes.get(outcome, 0) + 1
        if outcome == "ok":
            counts, bucket = entry.latencies.setdefault(variant, {}), bisect_left(BOUNDS_S, seconds)
            counts[bucket] = counts.get(bucket, 0) + 1

    def last_minute(self) -> LastMinute:
        """Return the counts of the last minute, without the second that has just begun."""
        now = int(self._clock())
        return LastMinute(
            self._began, [each for each in self._entries if now - WINDOW_S <= each.second < now]
        )

    def state(
        self,
        in_flight: int,
        limit: int,
        is_ready: bool | None = None,
        why_not_ready: str = "",
        others: Sequence[LastMinute] = (),
    ) -> LiveState:
        """Return the last minute, without the second that has just begun.

        Args:
            in_flight, limit, is_ready, why_not_ready: fields of the state.
            others: the last minute of the gateway's other workers, for the same model.
        """
        now, minutes = int(self._clock()), [self.last_minute(), *others]
        entries = _by_second(minutes, range(now - WINDOW_S, now))
        length_s = max(1, min(WINDOW_S, now - min(each.began for each in minutes)))
        outcomes = _sum(entry.outcomes for entry in entries.values())
        names = sorted({name for entry in entries.values() for name in entry.latencies})
        of_variant = {
            name: _sum(entry.latencies.get(name, {}) for entry in entries.values()) for name in names
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
        history = [_second(now, entries.get(second, SecondCounts(second))) for second in seconds]
        per_s = round(sum(outcomes.values()) / length_s, 2)
        load = per_s, in_flight, limit, dict(outcomes)
        return LiveState(WINDOW_S, *load, variants, history, is_ready, why_not_ready)


def _by_second(minutes: Iterable[LastMinute], window: range) -> dict[int, SecondCounts]:
    """Add up the counts of all workers in a window; reports of other workers are some seconds old."""
    found: dict[int, SecondCounts] = {}
    for entry in (entry for minute in minutes for entry in minute.seconds if entry.second in window):
        total = found.setdefault(entry.second, SecondCounts(entry.second))
        total.outcomes = _sum((total.outcomes, entry.outcomes))
        for variant, counts in entry.latencies.items():
            total.latencies[variant] = _sum((total.latencies.get(variant, {}), counts))
    return found


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
    """Return the upper bound of the bucket in which a quantile lies."""
    buckets = sorted(counts)
    below = list(accumulate(counts[bucket] for bucket in buckets))
    bucket = buckets[bisect_left(below, share * below[-1])]
    return round(BOUNDS_S[min(bucket, len(BOUNDS_S) - 1)] * 1e3, 2)

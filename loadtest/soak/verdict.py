"""The verdicts of a soak: growth of memory, and leftovers.

Memory is judged by its trend without changes, and by what each round of changes keeps: the median of the
slopes between all pairs of samples (Theil and Sen), with an interval from resampled samples. No single step,
peak or sawtooth moves this median. Counts are compared before and after the traffic.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest import record

RESAMPLES, CONFIDENCE = 400, 0.95
# Enough for a slope, and few enough to compare all pairs quickly.
MIN_SAMPLES, MAX_SAMPLES = 8, 200
HEADINGS = ("measure", "start", "end", "slope", "bound", "verdict")
TRAFFIC_HEADINGS = ("requests", "sent", "wrong outcomes")


@dataclass(frozen=True, slots=True)
class Trend:
    """The growth per minute, with its 95 % interval."""

    slope: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """One verdict: start, end and bound of a number.

    Slope and bound of a trend are per minute; other bounds apply to the end.
    """

    what: str
    unit: str
    start: float
    end: float
    bound: float
    is_good: bool
    trend: Trend | None = None

    def text(self) -> str:
        """Return the verdict in one line."""
        if self.trend is None:
            return f"{self.what}: expected at most {self.bound:g}, got {self.end:g} (before: {self.start:g})"
        within = f"({self.trend.low:+.2f} to {self.trend.high:+.2f})"
        return (
            f"{self.what}: expected at most {self.bound:+.2f} {self.unit}/min, "
            f"got {self.trend.slope:+.2f} {within}, from {self.start:.1f} to {self.end:.1f} {self.unit}"
        )


def trend(minutes: Sequence[float], values: Sequence[float]) -> Trend:
    """Return the slope of a series with its interval."""
    at, of = np.array(thinned(list(zip(minutes, values, strict=True)))).T
    first, second = np.triu_indices(len(at), 1)
    random = np.random.default_rng(0)
    slopes = []
    for _ in range(RESAMPLES):
        chosen = np.sort(random.integers(len(at), size=len(at)))
        apart = at[chosen[second]] - at[chosen[first]]
        rise = of[chosen[second]] - of[chosen[first]]
        slopes.append(np.median(rise[apart > 0] / apart[apart > 0]))
    slope = float(np.median((of[second] - of[first]) / (at[second] - at[first])))
    low, high = np.quantile(slopes, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Trend(slope, float(low), float(high))


def thinned(samples: Sequence[Any]) -> list[Any]:
    """Return at most `MAX_SAMPLES` of the samples, evenly spaced."""
    places = np.linspace(0, len(samples) - 1, min(len(samples), MAX_SAMPLES), dtype=int)
    return [samples[place] for place in places]


def growth(
    what: str,
    unit: str,
    minutes: Sequence[float],
    values: Sequence[float],
    share: float,
    allowed: float = 0.0,
) -> Verdict:
    """Judge a series: it fails if it certainly grows, and by more than a share over the whole time.

    Args:
        what, unit: of the values.
        minutes: times of the values.
        values: from calm spans.
        share: allowed growth as a share of the median.
        allowed: growth that is always allowed.
    """
    if len(values) < MIN_SAMPLES:
        raise ValueError(f"{what}: expected {MIN_SAMPLES} samples, got {len(values)}; fix: a longer soak")
    found = trend(minutes, values)
    bound = max(share * float(np.median(values)), allowed) / (minutes[-1] - minutes[0])
    part = max(1, len(values) // 5)
    start, end = float(np.median(values[:part])), float(np.median(values[-part:]))
    return Verdict(what, unit, start, end, bound, not (found.low > 0 and found.slope > bound), found)


def not_more(what: str, before: float, after: float, more: float = 0) -> Verdict:
    """Judge a count: it must not exceed the count before, plus `more`."""
    return Verdict(what, "", before, after, before + more, after <= before + more)


def absent(what: str, found: Collection[object] | float) -> Verdict:
    """Judge a number or a collection that must be empty; the verdict shows the first names."""
    if isinstance(found, (int, float)):
        return Verdict(what, "", 0, found, 0, not found)
    names = ", ".join(map(str, list(found)[:3]))
    return Verdict(f"{what} ({names})" if names else what, "", 0, len(found), 0, not found)


def _cells(row: Mapping[str, Any]) -> list[str]:
    unit, found = (f" {row['unit']}" if row["unit"] else ""), row["trend"]
    verdict = "kept" if row["is_good"] else "**failed**"
    if not found:
        start, end, bound = (f"{row[name]:g}{unit}" for name in ("start", "end", "bound"))
        return [row["what"], start, end, "", bound, verdict]
    slope = f"{found['slope']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f}){unit}/min"
    ends = [f"{row[name]:.1f}{unit}" for name in ("start", "end")]
    return [row["what"], *ends, slope, f"{row['bound']:.2f}{unit}/min", verdict]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render the verdicts as the table of docs/soak.md."""
    return record.markdown(HEADINGS, map(_cells, rows))


def traffic_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render the sent requests as the other table of docs/soak.md."""
    return record.markdown(
        TRAFFIC_HEADINGS, ([row["kind"], f"{row['sent']:,}", f"{row['wrong']:,}"] for row in rows)
    )

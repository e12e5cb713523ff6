"""What is read out of a soak's numbers: whether something has grown, and what is left.

Memory is judged by its trend while everything is as usual, since it breathes: by the median of the slopes
between all pairs of samples (Theil, Sen), which no single step, peak or sawtooth moves, with an interval from
resampled samples. What can be counted is judged before and after, while nothing is asked.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadtest import record

RESAMPLES, CONFIDENCE = 400, 0.95
# Enough for a slope, and few enough that all their pairs are soon compared.
FEWEST, MOST_SAMPLES = 8, 200
HEADINGS = ("what", "start", "end", "slope", "bound", "verdict")
TRAFFIC_HEADINGS = ("requests", "sent", "not as they must be")


@dataclass(frozen=True, slots=True)
class Trend:
    """How fast something grows a minute, and between which bounds that is known, 95 %."""

    slope: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judgement: what was at the start and at the end, what was allowed, and whether it kept to that.

    `slope` and `bound` of a trend are a minute's; the bound of anything else is for its end.
    """

    what: str
    unit: str
    start: float
    end: float
    bound: float
    is_good: bool
    trend: Trend | None = None

    def told(self) -> str:
        """Return it in one line."""
        if self.trend is None:
            return f"{self.what}: {self.start:g}, then {self.end:g}, at most {self.bound:g}"
        within = f"({self.trend.low:+.2f} to {self.trend.high:+.2f})"
        return (
            f"{self.what}: {self.start:.1f}, then {self.end:.1f} {self.unit}, "
            f"{self.trend.slope:+.2f} a minute {within}, at most {self.bound:.2f}"
        )


def trend(minutes: Sequence[float], values: Sequence[float]) -> Trend:
    """Return the slope of a series, and the interval in which it lies."""
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
    """Return `MOST_SAMPLES` of the samples, evenly taken, or all if they are fewer."""
    places = np.linspace(0, len(samples) - 1, min(len(samples), MOST_SAMPLES), dtype=int)
    return [samples[place] for place in places]


def grown(what: str, unit: str, minutes: Sequence[float], values: Sequence[float], share: float) -> Verdict:
    """Judge a series: it fails if it surely grows, and in the time that was watched by more than a share.

    Args:
        what, unit: of the values.
        minutes: when they were taken.
        values: while everything was as usual.
        share: how much of the median it may grow.
    """
    if len(values) < FEWEST:
        raise ValueError(f"a trend needs {FEWEST} samples, got {len(values)}; fix: soak for longer")
    found = trend(minutes, values)
    bound = share * float(np.median(values)) / (minutes[-1] - minutes[0])
    part = max(1, len(values) // 5)
    start, end = float(np.median(values[:part])), float(np.median(values[-part:]))
    return Verdict(what, unit, start, end, bound, not (found.low > 0 and found.slope > bound), found)


def kept(what: str, before: float, after: float, more: float = 0) -> Verdict:
    """Judge a count: it must not be more than before, and what it may have `more`."""
    return Verdict(what, "", before, after, before + more, after <= before + more)


def none(what: str, found: Collection[object] | float) -> Verdict:
    """Judge what must not be there at all; names are told beside it."""
    if isinstance(found, (int, float)):
        return Verdict(what, "", 0, found, 0, not found)
    names = ", ".join(map(str, list(found)[:3]))
    return Verdict(f"{what} ({names})" if names else what, "", 0, len(found), 0, not found)


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return a row as text, for the table and the page alike."""
    unit, found = (f" {row['unit']}" if row["unit"] else ""), row["trend"]
    verdict = "kept" if row["is_good"] else "**failed**"
    if not found:
        return [
            row["what"],
            f"{row['start']:g}{unit}",
            f"{row['end']:g}{unit}",
            "",
            f"{row['bound']:g}{unit}",
            verdict,
        ]
    slope = f"{found['slope']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f}){unit}/min"
    ends = [f"{row[name]:.1f}{unit}" for name in ("start", "end")]
    return [row["what"], *ends, slope, f"{row['bound']:.2f}{unit}/min", verdict]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render the verdicts as the page's table; a test compares the two."""
    return record.markdown(HEADINGS, map(cells, rows))


def traffic_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render what was sent as the page's other table."""
    return record.markdown(
        TRAFFIC_HEADINGS, ([row["kind"], f"{row['sent']:,}", f"{row['wrong']:,}"] for row in rows)
    )

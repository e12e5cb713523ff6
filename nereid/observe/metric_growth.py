"""The growth of counters and histograms from one metrics page to the next. Pure, without clock or network.

Counters begin anew when their process restarts. A counter that has fallen was reset, and its new value is its
growth, as in Prometheus.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from nereid import metrics_page

LabelSet = frozenset[tuple[str, str]]
BUCKET, BOUND = "_bucket", "le"
ANY: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """The samples of one page, by name and labels, and the time when it was read, in monotonic seconds."""

    read_s: float
    samples: Mapping[str, Mapping[LabelSet, float]]

    @classmethod
    def parse(cls, text: str, read_s: float) -> "MetricsPage":
        """Parse a page in Prometheus' text format."""
        samples: dict[str, dict[LabelSet, float]] = defaultdict(dict)
        for each in metrics_page.parse(text):
            samples[each.name][frozenset(each.labels.items())] = each.value
        return cls(read_s, samples)

    def select(
        self, name: str, labels: Mapping[str, str] = ANY, without: Mapping[str, str] = ANY
    ) -> Iterator[tuple[dict[str, str], float]]:
        """Yield labels and value of the series that have all of `labels` and none of `without`."""
        for series, value in self.samples.get(name, {}).items():
            if labels.items() <= series and not without.items() & series:
                yield dict(series), value

    def values(self, name: str, label: str, labels: Mapping[str, str] = ANY) -> set[str]:
        """Return the values that a label has on the series of a metric with these other labels."""
        return {found[label] for found, _ in self.select(name, labels) if label in found}

    def total(self, name: str, labels: Mapping[str, str] = ANY) -> float | None:
        """Return the sum of the series of a metric with these labels; None without any."""
        found = [value for _, value in self.select(name, labels)]
        return sum(found) if found else None


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth between two pages of one server.

    Args:
        before: the first page.
        after: the second page.
        is_restarted: whether the server restarted in between, so that all counts of `after` are new.
    """

    before: MetricsPage
    after: MetricsPage
    is_restarted: bool = False

    @property
    def seconds(self) -> float:
        """The time between the two pages."""
        return self.after.read_s - self.before.read_s

    def total(self, name: str, labels: Mapping[str, str] = ANY, without: Mapping[str, str] = ANY) -> float:
        """Return the growth of the selected series of a counter, all together; 0 without any."""
        grown = 0.0
        for found, value in self.after.select(name, labels, without):
            earlier = self._earlier(name, found)
            grown += value - earlier if value >= earlier else value
        return grown

    def rate(self, name: str, labels: Mapping[str, str] = ANY, without: Mapping[str, str] = ANY) -> float:
        """Return the growth of the selected series per second."""
        return self.total(name, labels, without) / self.seconds

    def quantile(
        self, share: float, name: str, labels: Mapping[str, str] = ANY, without: Mapping[str, str] = ANY
    ) -> float | None:
        """Return a quantile of the observations of the selected histograms; None without an observation.

        `share` is the part of the observations that are at most as large, 0 to 1.
        """
        histograms: dict[LabelSet, dict[float, tuple[float, float]]] = defaultdict(dict)
        for found, value in self.after.select(name + BUCKET, labels, without):
            earlier = self._earlier(name + BUCKET, found)
            bound = float(found.pop(BOUND))
            histograms[frozenset(found.items())][bound] = value, earlier
        sums = defaultdict[float, float](float)
        for buckets in histograms.values():
            # Some buckets of a histogram that was reset may have grown beyond their old value.
            is_reset = any(value < earlier for value, earlier in buckets.values())
            for bound, (value, earlier) in buckets.items():
                sums[bound] += value if is_reset else value - earlier
        return interpolate(share, sums)

    def _earlier(self, name: str, labels: Mapping[str, str]) -> float:
        if self.is_restarted:
            return 0.0
        return self.before.samples.get(name, {}).get(frozenset(labels.items()), 0.0)


def interpolate(share: float, buckets: Mapping[float, float]) -> float | None:
    """Return a quantile of a histogram, linear within the bucket that contains it; None without observations.

    Beyond the last finite bound, the quantile is this bound.

    Args:
        share: of the observations that are at most as large, 0 to 1.
        buckets: number of observations up to each upper bound; the last bound is infinite.

    Source: Prometheus, `histogram_quantile`.
    """
    bounds = sorted(buckets)
    if not bounds or not (total := buckets[bounds[-1]]):
        return None
    rank, lower, below = share * total, 0.0, 0.0
    for bound in bounds:
        inside = buckets[bound] - below
        if inside > 0 and buckets[bound] >= rank:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * max(0.0, rank - below) / inside
        lower, below = bound, buckets[bound]
    return lower

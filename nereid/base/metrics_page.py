"""Prometheus' text format: the samples of a metrics page, and their growth since an earlier page.

Counters begin anew when their process restarts. A counter that has fallen was reset, and its new value is its
growth, as in Prometheus.
"""

import http.client
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nereid.base.addresses import open_http

Labels = tuple[tuple[str, str], ...]
LabelSet = frozenset[tuple[str, str]]
# By label, its value or its possible values.
Wanted = Mapping[str, str | Collection[str]]
ANY: Wanted = {}
BUCKET, BOUND = "_bucket", "le"
SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
GAUGE = re.compile(r"# TYPE (\w+) gauge")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The values of a page by name and labels, or their growth between two pages; names of its gauges."""

    samples: Mapping[str, Mapping[LabelSet, float]]
    gauges: Collection[str] = ()

    @classmethod
    def parse(cls, page: str, prefixes: tuple[str, ...] = ("",), labels: Wanted = ANY) -> "Snapshot":
        """Parse the samples of a page whose names have one of the prefixes, and that have these labels.

        `prometheus_client.parser` appends `_total` to the counters of Triton, such as `nv_inference_count`.
        """
        samples: dict[str, dict[LabelSet, float]] = defaultdict(dict)
        for line in page.splitlines():
            if line.startswith(prefixes) and (found := SAMPLE.fullmatch(line)):
                own = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                if _has(own, labels):
                    samples[found[1]][frozenset(own.items())] = float(found[3])
        return cls(dict(samples), frozenset(GAUGE.findall(page)))

    def __sub__(self, earlier: "Snapshot") -> "Snapshot":
        """Return the growth of all counters since an earlier page; it has no gauges.

        A series that the earlier page lacks has grown from zero, and one that has gone does not count. One
        smaller value shows that all series of a histogram were reset, even if others exceed the old ones.
        """
        counters = {name: series for name, series in self.samples.items() if name not in self.gauges}
        resets = {
            _owner(name, labels)
            for name, series in counters.items()
            for labels, value in series.items()
            if value < earlier._value(name, labels)
        }

        def grown(name: str, labels: LabelSet, value: float) -> float:
            is_reset = resets and _owner(name, labels) in resets
            return value if is_reset else value - earlier._value(name, labels)

        return Snapshot(
            {
                name: {labels: grown(name, labels, value) for labels, value in series.items()}
                for name, series in counters.items()
            }
        )

    def was_reset(self, earlier: "Snapshot", counters: Collection[str]) -> bool:
        """Return whether a series of these counters has fallen or gone since an earlier page."""
        return any(
            self._value(name, labels) < value
            for name in counters
            for labels, value in earlier.samples.get(name, {}).items()
        )

    def _value(self, name: str, labels: LabelSet) -> float:
        return self.samples.get(name, {}).get(labels, 0.0)

    def sums(
        self, name: str, *by: str, labels: Wanted = ANY, without: Wanted = ANY
    ) -> dict[tuple[str, ...], float]:
        """Return the sums of the series with all of `labels` and none of `without`.

        They are by the values of the labels `by`; a series without such a label counts as an empty value.
        """
        found: dict[tuple[str, ...], float] = defaultdict(float)
        for series, value in self.samples.get(name, {}).items():
            own = dict(series)
            if _has(own, labels) and not any(_has(own, {key: bad}) for key, bad in without.items()):
                found[tuple(own.get(label, "") for label in by)] += value
        return dict(found)

    def gauge(self, name: str, labels: Wanted = ANY) -> float | None:
        """Return the sum of the series with these labels; None without any."""
        return self.sums(name, labels=labels).get(())

    def total(self, name: str, labels: Wanted = ANY, without: Wanted = ANY) -> float:
        """Return the sum of the series with all of `labels` and none of `without`; 0 without any."""
        return self.sums(name, labels=labels, without=without).get((), 0.0)

    def buckets(
        self, name: str, *by: str, labels: Wanted = ANY, without: Wanted = ANY
    ) -> dict[tuple[str, ...], dict[float, float]]:
        """Return the observations of histograms in each bucket alone, by its upper bound, smallest first.

        The histograms are selected and summed as in `sums`. Triton may write a page while a process counts:
        a bucket that lags behind a smaller one is negative, and the next page makes up for it. Sums over
        pages are therefore right; `without_lag` is for a single page.
        """
        found: dict[tuple[str, ...], dict[float, float]] = defaultdict(dict)
        sums = self.sums(name + BUCKET, *by, BOUND, labels=labels, without=without)
        below: dict[tuple[str, ...], float] = defaultdict(float)
        for (*key, bound), count in sorted(sums.items(), key=lambda item: float(item[0][-1])):
            found[*key,][float(bound)] = count - below[*key,]
            below[*key,] = count
        return dict(found)

    def quantile(self, share: float, name: str, labels: Wanted = ANY, without: Wanted = ANY) -> float:
        """Return a quantile of the observations of histograms, as the function `quantile` does."""
        return quantile(share, self.buckets(name, labels=labels, without=without).get((), {}))


def _has(labels: Mapping[str, str], wanted: Wanted) -> bool:
    return all(
        labels.get(key) == value if isinstance(value, str) else labels.get(key) in value
        for key, value in wanted.items()
    )


def _owner(name: str, labels: LabelSet) -> tuple[str, LabelSet]:
    """Return the histogram of a series; another series is its own."""
    histogram = re.sub("_(bucket|sum|count)$", "", name)
    return histogram, frozenset(label for label in labels if label[0] != BOUND)


def without_lag(buckets: Mapping[float, float]) -> dict[float, float]:
    """Return the observations in each bucket, smallest first; one that lags behind a smaller one is empty."""
    found, total, below = dict[float, float](), 0.0, 0.0
    for bound, count in buckets.items():
        total += count
        found[bound], below = max(0.0, total - below), max(total, below)
    return found


def quantile(share: float, buckets: Mapping[float, float]) -> float:
    """Return the value below which a share of the observations is; `nan` without any.

    It is linear within the bucket that contains it. Beyond the last finite bound, the quantile is this bound.

    Args:
        share: 0 to 1.
        buckets: the observations in each bucket alone by its upper bound, smallest first.

    Source: Prometheus, `histogram_quantile`.
    """
    buckets = without_lag(buckets)
    rank, below, lower = share * sum(buckets.values()), 0.0, 0.0
    for bound, inside in buckets.items():
        if inside and below + inside >= rank:
            return lower if math.isinf(bound) else lower + (bound - lower) * max(0.0, rank - below) / inside
        below, lower = below + inside, bound
    return lower if below else math.nan


def render(
    samples: Mapping[tuple[str, Labels], float], prefix: str, metrics: Mapping[str, tuple[str, str]]
) -> str:
    """Return samples in Prometheus' text format; each metric has its header, with or without samples.

    Args:
        samples: values by name and labels.
        prefix: the beginning of all names.
        metrics: kind and description of each metric.
    """
    lines = []
    for name, (kind, text) in metrics.items():
        lines += [f"# HELP {prefix}{name} {text}", f"# TYPE {prefix}{name} {kind}"]
        for (family, labels), value in sorted(samples.items()):
            if family == name:
                inner = ",".join(f'{key}="{_escape(word)}"' for key, word in labels)
                lines.append(f"{prefix}{name}{f'{{{inner}}}' if inner else ''} {value:.15g}")
    return "\n".join(lines) + "\n"


def _escape(word: str) -> str:
    return word.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def fetch(url: str, timeout_s: float) -> str:
    """Return the text of the metrics page at an address, HOST:PORT or `unix:PATH`.

    Raises:
        OSError, http.client.HTTPException: no response in time, or a response without the page.
    """
    status, page = get(url, "/metrics", timeout_s)
    if status != http.HTTPStatus.OK:
        raise http.client.HTTPException(f"{status} {page.strip()[:200]}")
    return page


def get(url: str, path: str, timeout_s: float) -> tuple[int, str]:
    """Return status and text of a response.

    Raises:
        OSError, http.client.HTTPException: no response in time.
    """
    connection = open_http(url, timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    finally:
        connection.close()

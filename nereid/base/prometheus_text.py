"""Prometheus text format: the samples of a metrics page, and their increase since an earlier page.

Counters restart at zero when their process restarts. As in Prometheus, a counter that decreased was reset,
so its new value is the increase.
"""

import http.client
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from nereid.base.addresses import open_http

MetricLabels = tuple[tuple[str, str], ...]
LabelSet = frozenset[tuple[str, str]]
# Each label's required value, or its allowed values.
LabelMatchers = Mapping[str, str | Collection[str]]
ANY: LabelMatchers = {}
BUCKET, BOUND = "_bucket", "le"
SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")
GAUGE = re.compile(r"# TYPE (\w+) gauge")


@dataclass(frozen=True, slots=True)
class MetricSamples:
    """A page's values by name and labels, or their increase between two pages; and its gauges' names."""

    samples: Mapping[str, Mapping[LabelSet, float]]
    gauges: Collection[str] = ()

    @classmethod
    def parse(
        cls, page: str, prefixes: tuple[str, ...] = ("",), labels: LabelMatchers = ANY
    ) -> "MetricSamples":
        """Parse a page's samples whose names start with one of the prefixes and that have these labels.

        `prometheus_client.parser` would append `_total` to Triton's counters, such as `nv_inference_count`.
        """
        samples: dict[str, dict[LabelSet, float]] = defaultdict(dict)
        for line in page.splitlines():
            if line.startswith(prefixes) and (match := SAMPLE.fullmatch(line)):
                sample_labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                if _has(sample_labels, labels):
                    samples[match[1]][frozenset(sample_labels.items())] = float(match[3])
        return cls(dict(samples), frozenset(GAUGE.findall(page)))

    def __sub__(self, earlier: "MetricSamples") -> "MetricSamples":
        """Return the increase of all counters since an earlier page; the result has no gauges.

        A series missing from the earlier page increased from zero; one that disappeared is ignored. If any
        value of a histogram decreased, all its series were reset, even those that exceed their old values.
        """
        counters = {name: series for name, series in self.samples.items() if name not in self.gauges}
        resets = {
            _owner(name, labels)
            for name, series in counters.items()
            for labels, value in series.items()
            if value < earlier._value(name, labels)
        }

        def increase_of(name: str, labels: LabelSet, value: float) -> float:
            is_reset = resets and _owner(name, labels) in resets
            return value if is_reset else value - earlier._value(name, labels)

        return MetricSamples(
            {
                name: {labels: increase_of(name, labels, value) for labels, value in series.items()}
                for name, series in counters.items()
            }
        )

    def was_reset(self, earlier: "MetricSamples", counters: Collection[str]) -> bool:
        """Return whether any series of these counters decreased or disappeared since an earlier page."""
        return any(
            self._value(name, labels) < value
            for name in counters
            for labels, value in earlier.samples.get(name, {}).items()
        )

    def _value(self, name: str, labels: LabelSet) -> float:
        return self.samples.get(name, {}).get(labels, 0.0)

    def sums(
        self, name: str, *by: str, labels: LabelMatchers = ANY, excluding: LabelMatchers = ANY
    ) -> dict[tuple[str, ...], float]:
        """Return the sums of the series that match all of `labels` and none of `excluding`.

        Sums are grouped by the values of the labels `by`; a missing label counts as an empty value.
        """
        sums: dict[tuple[str, ...], float] = defaultdict(float)
        for series, value in self.samples.get(name, {}).items():
            series_labels = dict(series)
            if _has(series_labels, labels) and not any(
                _has(series_labels, {key: bad}) for key, bad in excluding.items()
            ):
                sums[tuple(series_labels.get(label_value, "") for label_value in by)] += value
        return dict(sums)

    def gauge(self, name: str, labels: LabelMatchers = ANY) -> float | None:
        """Return the sum of the series with these labels, or None if there are none."""
        return self.sums(name, labels=labels).get(())

    def total(self, name: str, labels: LabelMatchers = ANY, excluding: LabelMatchers = ANY) -> float:
        """Return the sum of the series that match `labels` and none of `excluding`; 0 if none match."""
        return self.sums(name, labels=labels, excluding=excluding).get((), 0.0)

    def buckets(
        self, name: str, *by: str, labels: LabelMatchers = ANY, excluding: LabelMatchers = ANY
    ) -> dict[tuple[str, ...], dict[float, float]]:
        """Return non-cumulative histogram bucket counts by upper bound, smallest first.

        The histograms are selected and summed as in `sums`. Triton may render a page while counters are being
        updated, so a bucket that lags behind a smaller one is negative until the next page corrects it. Sums
        over pages are therefore correct; for a single page, use `without_lag`.
        """
        buckets: dict[tuple[str, ...], dict[float, float]] = defaultdict(dict)
        sums = self.sums(name + BUCKET, *by, BOUND, labels=labels, excluding=excluding)
        below: dict[tuple[str, ...], float] = defaultdict(float)
        for (*key, bound), count in sorted(sums.items(), key=lambda item: float(item[0][-1])):
            buckets[*key,][float(bound)] = count - below[*key,]
            below[*key,] = count
        return dict(buckets)

    def quantile(
        self, share: float, name: str, labels: LabelMatchers = ANY, excluding: LabelMatchers = ANY
    ) -> float:
        """Return a quantile of the histograms' observations, as computed by the function `quantile`."""
        return quantile(share, self.buckets(name, labels=labels, excluding=excluding).get((), {}))


def _has(labels: Mapping[str, str], matchers: LabelMatchers) -> bool:
    return all(
        labels.get(key) == value if isinstance(value, str) else labels.get(key) in value
        for key, value in matchers.items()
    )


def _owner(name: str, labels: LabelSet) -> tuple[str, LabelSet]:
    """Return the histogram that a series belongs to; any other series is returned unchanged."""
    histogram = re.sub("_(bucket|sum|count)$", "", name)
    return histogram, frozenset(label_value for label_value in labels if label_value[0] != BOUND)


def without_lag(buckets: Mapping[float, float]) -> dict[float, float]:
    """Return the count in each bucket, smallest first; one that lags behind a smaller one is empty."""
    counts, total, below = dict[float, float](), 0.0, 0.0
    for bound, count in buckets.items():
        total += count
        counts[bound], below = max(0.0, total - below), max(total, below)
    return counts


def quantile(share: float, buckets: Mapping[float, float]) -> float:
    """Return the value below which a fraction of the observations lies; `nan` if there are none.

    Interpolates linearly within the bucket. A quantile beyond the last finite bound is that bound.

    Args:
        share: 0 to 1.
        buckets: non-cumulative counts by upper bound, smallest first.

    Source: Prometheus, `histogram_quantile`.
    """
    buckets = without_lag(buckets)
    rank, below, lower = share * sum(buckets.values()), 0.0, 0.0
    for bound, inside in buckets.items():
        if inside and below + inside >= rank:
            return lower if math.isinf(bound) else lower + (bound - lower) * max(0.0, rank - below) / inside
        below, lower = below + inside, bound
    return lower if below else math.nan


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric family: its kind, a description, and the upper bounds of a histogram's buckets.

    `COUNTER_HISTOGRAM` is a histogram whose buckets are counters for Triton. One observation in a `HISTOGRAM`
    costs a round trip to the server (16 µs of CPU, AMD EPYC, 2026-11-25); a `COUNTER_HISTOGRAM` costs one for
    each changed bucket and flush.

    Args:
        labels: the labels of its series, in addition to those that all families of the prefix have.
    """

    kind: Literal["COUNTER", "GAUGE", "HISTOGRAM", "COUNTER_HISTOGRAM"]
    description: str
    buckets: tuple[float, ...] = ()
    labels: tuple[str, ...] = ()


def counter(description: str, labels: str = "") -> MetricSpec:
    """Return a counter; `labels` is separated by spaces."""
    return MetricSpec("COUNTER", description, (), tuple(labels.split()))


def gauge(description: str, labels: str = "") -> MetricSpec:
    """Return a gauge."""
    return MetricSpec("GAUGE", description, (), tuple(labels.split()))


def histogram(description: str, buckets: tuple[float, ...], labels: str = "") -> MetricSpec:
    """Return a histogram."""
    return MetricSpec("HISTOGRAM", description, buckets, tuple(labels.split()))


def counter_histogram(description: str, buckets: tuple[float, ...], labels: str = "") -> MetricSpec:
    """Return a histogram that is a `COUNTER_HISTOGRAM` for Triton."""
    return MetricSpec("COUNTER_HISTOGRAM", description, buckets, tuple(labels.split()))


def render(
    samples: Mapping[tuple[str, MetricLabels], float], prefix: str, metrics: Mapping[str, MetricSpec]
) -> str:
    """Return samples in Prometheus text format; every metric has its header, even without samples.

    Args:
        samples: values by name and labels.
        prefix: prepended to all names.
        metrics: the counters and gauges by name.
    """
    lines = []
    for name, spec in metrics.items():
        lines += [f"# HELP {prefix}{name} {spec.description}", f"# TYPE {prefix}{name} {spec.kind.lower()}"]
        for (family, labels), value in sorted(samples.items()):
            if family == name:
                label_text = ",".join(f'{key}="{_escape(label_value)}"' for key, label_value in labels)
                lines.append(f"{prefix}{name}{f'{{{label_text}}}' if label_text else ''} {value:.15g}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def fetch(url: str, timeout_s: float) -> str:
    """Return the text of the metrics page at HOST:PORT or `unix:PATH`.

    Raises:
        OSError, http.client.HTTPException: no response in time, or a response without the page.
    """
    status, page = get(url, "/metrics", timeout_s)
    if status != http.HTTPStatus.OK:
        raise http.client.HTTPException(f"{status} {page.strip()[:200]}")
    return page


def get(url: str, path: str, timeout_s: float) -> tuple[int, str]:
    """Return a response's status and text.

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

"""Histograms of signals on a metrics page, and their growth from one page to the next."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from nereid import metrics_page
from nereid.routing.reference_file import CLASS
from nereid.triton.metrics import IMAGE_METRICS, IMAGE_PREFIX, ROUTE_PREFIX, ROUTE_QUALITY_METRICS

ROUTE, IMAGE, SHADOW = "route", "image", "shadow"
OUTPUT_SIGNALS = tuple(name for name, about in ROUTE_QUALITY_METRICS.items() if about.kind == "TALLY")
INPUT_SIGNALS = tuple(IMAGE_METRICS)
SIGNALS = (*OUTPUT_SIGNALS, CLASS, *INPUT_SIGNALS)
BOUNDS: Mapping[str, tuple[float, ...]] = {
    name: about.buckets for name, about in {**ROUTE_QUALITY_METRICS, **IMAGE_METRICS}.items() if about.buckets
}
# More series than 16 variants have; a page with more is not recorded completely.
MAX_SERIES = 1024
BUCKET, SEPARATOR = "_bucket", "|"
# By series, the counts by bucket (its upper bound), by class, or by outcome; without zeros.
Growth: TypeAlias = dict[str, dict[str, int]]
# As `Growth` since the start of the server, for each instance of a route.
Page: TypeAlias = dict[tuple[str, str], dict[str, float]]


def route_series(route: str, variant: str, version: str, signal: str) -> str:
    """Return the name of a series of the responses of a variant."""
    return SEPARATOR.join((ROUTE, route, variant, version, signal))


def image_series(model: str, version: int, signal: str) -> str:
    """Return the name of a series of the images of a model."""
    return SEPARATOR.join((IMAGE, model, str(version), signal))


def shadow_series(route: str, shadow: str) -> str:
    """Return the name of the series of outcomes of a shadow."""
    return SEPARATOR.join((SHADOW, route, shadow))


def is_of_classes(series: str) -> bool:
    """Return whether a series has the best classes of a variant."""
    return series.endswith(SEPARATOR + CLASS)


def read(text: str) -> Page:
    """Parse the series of a metrics page; buckets are cumulative, as on the page."""
    found: Page = defaultdict(dict)
    for sample in metrics_page.parse(text):
        if not sample.name.startswith((ROUTE_PREFIX, IMAGE_PREFIX)):
            continue
        labels = sample.labels
        if (place := _place(sample.name, labels)) and (place[0] in found or len(found) < MAX_SERIES):
            series, bucket = place
            found[series][bucket] = found[series].get(bucket, 0.0) + sample.value
    return dict(found)


def _place(name: str, labels: Mapping[str, str]) -> tuple[tuple[str, str], str] | None:
    """Return series, instance and bucket of a sample; None for other metrics."""
    if name.startswith(IMAGE_PREFIX):
        signal = name.removeprefix(IMAGE_PREFIX).removesuffix(BUCKET)
        if not name.endswith(BUCKET) or signal not in INPUT_SIGNALS:
            return None
        return (image_series(labels["model"], int(labels["version"]), signal), ""), labels["le"]
    signal, instance = name.removeprefix(ROUTE_PREFIX), labels.get("model_instance", "")
    if signal == "shadow_requests_total":
        return (shadow_series(labels["route"], labels["shadow"]), instance), labels["outcome"]
    if signal == "predicted_total":
        variant = labels["route"], labels["variant"], labels["version"]
        return (route_series(*variant, CLASS), instance), labels["class"]
    if signal.endswith(BUCKET) and (signal := signal.removesuffix(BUCKET)) in OUTPUT_SIGNALS:
        variant = labels["route"], labels["variant"], labels["version"]
        return (route_series(*variant, signal), instance), labels["le"]
    return None


def growth(old: Page, new: Page) -> Growth:
    """Return the counts between two pages of one server.

    Counters begin anew when a process restarts. The growth of a series with a smaller count than before is
    not known, and is left out.
    """
    found: Growth = {}
    for key, counts in new.items():
        before = old.get(key, {})
        grown = {bucket: int(value - before.get(bucket, 0)) for bucket, value in counts.items()}
        if any(value < 0 for value in grown.values()):
            continue
        series = key[0]
        if not series.startswith(SHADOW) and not is_of_classes(series):
            grown = _single(grown)
        # Interned, because each slot of the history has the same names.
        total = found.setdefault(sys.intern(series), {})
        for bucket, value in grown.items():
            if value:
                total[sys.intern(bucket)] = total.get(bucket, 0) + value
    return {series: counts for series, counts in found.items() if counts}


def _single(cumulative: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of each bucket alone."""
    found, below = {}, 0
    for bound in sorted(cumulative, key=float):
        found[bound] = max(0, cumulative[bound] - below)
        below = cumulative[bound]
    return found


def histogram(counts: Mapping[str, int], signal: str) -> list[int]:
    """Return the counts of a signal's series in the order of its buckets."""
    return [counts.get(name, 0) for name in (*(f"{bound:g}" for bound in BOUNDS[signal]), "+Inf")]


def class_counts(counts: Mapping[str, int], classes: Sequence[int]) -> list[int]:
    """Return the counts of the classes, and that of all others."""
    named = [counts.get(str(index), 0) for index in classes]
    return [*named, sum(counts.values()) - sum(named)]

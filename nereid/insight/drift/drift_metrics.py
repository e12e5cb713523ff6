"""The state of the drift monitor for Prometheus."""

from collections.abc import Iterator

from nereid.base.metrics_page import Labels, render
from nereid.insight.drift.comparison import MEASURES, VariantDrift
from nereid.insight.drift.monitor import State

PREFIX = "nereid_drift_"
METRICS = {
    "score": ("gauge", "Distance of a signal of the last hour from its reference."),
    "limit": ("gauge", "Distance that chance alone exceeds in 1 of 10,000 looks at most."),
    "window_requests": ("gauge", "Classified images of a variant in the last hour."),
    "reference_age_seconds": ("gauge", "Age of the reference of a variant."),
    "last_request_seconds": ("gauge", "Seconds since the number of classified images last grew."),
}
LABELS = {
    "score": ("signal", "measure"),
    "limit": ("signal", "measure"),
}
COMMON_LABELS = ("route", "variant")


def metrics(state: State | None) -> str:
    """Return the samples of all variants with a reference in Prometheus' text format; nothing without one."""
    if state is None:
        return ""
    samples = {
        key: value
        for route in state.routes
        for variant in route.variants
        if not variant.problem
        for key, value in _samples(route.route, variant)
    }
    return render(samples, PREFIX, METRICS) if samples else ""


def _samples(route: str, variant: VariantDrift) -> Iterator[tuple[tuple[str, Labels], float]]:
    labels: Labels = (("route", route), ("variant", variant.variant))
    yield ("window_requests", labels), float(variant.requests)
    if variant.reference_age_s is not None:
        yield ("reference_age_seconds", labels), variant.reference_age_s
    if variant.idle_s is not None:
        yield ("last_request_seconds", labels), variant.idle_s
    for signal in variant.signals:
        for measure in MEASURES:
            more = (*labels, ("signal", signal.signal), ("measure", measure))
            if measure in signal.score:
                yield ("score", more), signal.score[measure]
                yield ("limit", more), signal.limit[measure]

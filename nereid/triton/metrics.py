"""Metrics of the backends, by their names without the prefix."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MetricKind:
    """A metric family: Triton's kind, a description, and the upper bounds of a histogram's buckets."""

    kind: Literal["COUNTER", "GAUGE", "HISTOGRAM"]
    description: str
    buckets: tuple[float, ...] = ()


DURATIONS_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0)

# Twice as fine, for the comparison of two variants.
ROUTE_DURATIONS_S = (
    *(0.0005, 0.0007, 0.001, 0.0014, 0.002, 0.0028, 0.004, 0.0056, 0.008, 0.011, 0.016, 0.022, 0.032, 0.045),
    *(0.064, 0.09, 0.125, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0),
)

SESSION_PREFIX = "nereid_onnxruntime_"
SESSION_METRICS: Mapping[str, MetricKind] = {
    "run_seconds": MetricKind("HISTOGRAM", "Duration of one run of the network", DURATIONS_S),
    "batch_size": MetricKind("HISTOGRAM", "Rows of one run of the network", (1, 2, 4, 8, 16, 32, 64, 128)),
    "rejected_total": MetricKind("COUNTER", "Rejected requests, by the code of the error"),
    "session_start_seconds_total": MetricKind("COUNTER", "Seconds that opening sessions took"),
    "sessions_total": MetricKind("COUNTER", "Sessions opened"),
    "instances": MetricKind("GAUGE", "Instances, by the execution provider in use"),
    "host_inputs_total": MetricKind("COUNTER", "Inputs on the host of an instance on a GPU: each is copied"),
}

ROUTE_PREFIX = "nereid_route_"
ROUTE_METRICS: Mapping[str, MetricKind] = {
    "requests_total": MetricKind("COUNTER", "Attempts on a variant, by outcome and reason"),
    "request_duration_seconds": MetricKind(
        "HISTOGRAM", "Seconds from arrival at the route to the variant's response", ROUTE_DURATIONS_S
    ),
    "in_flight": MetricKind("GAUGE", "Attempts on a variant that have not returned"),
    "late_total": MetricKind("COUNTER", "Attempts that returned after their deadline"),
    "cancelled_total": MetricKind("COUNTER", "Requests whose client disconnected"),
    "shed_total": MetricKind("COUNTER", "Requests rejected because too many were in flight"),
    "breaker_state": MetricKind("GAUGE", "0 closed, 1 half open, 2 open"),
    "shadow_requests_total": MetricKind("COUNTER", "Requests of a shadow: agreed, disagreed, failed, shed"),
    "shadow_score_distance": MetricKind(
        "HISTOGRAM",
        "Largest difference of one score between shadow and variant",
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    ),
    "shadow_duration_seconds": MetricKind(
        "HISTOGRAM", "Seconds until a shadow's response", (*DURATIONS_S, 4, 8)
    ),
    "shadowed_duration_seconds": MetricKind(
        "HISTOGRAM", "Seconds until the variant's response to these requests", (*DURATIONS_S, 4, 8)
    ),
    "generation": MetricKind("GAUGE", "Generation of the route in use"),
    "served_since_seconds": MetricKind("GAUGE", "Unix time at which this route file came into use"),
    "reloads_total": MetricKind("COUNTER", "Changes of the route file: accepted or refused"),
}

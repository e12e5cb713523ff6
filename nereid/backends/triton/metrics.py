"""Metrics of the backends, by their names without the prefix."""

from collections.abc import Mapping

from nereid.base.prometheus_text import MetricSpec, counter, counter_histogram, gauge, histogram

DURATIONS_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0)

# Twice as fine, for the comparison of two variants.
ROUTE_DURATIONS_S = (
    *(0.0005, 0.0007, 0.001, 0.0014, 0.002, 0.0028, 0.004, 0.0056, 0.008, 0.011, 0.016, 0.022, 0.032, 0.045),
    *(0.064, 0.09, 0.125, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0),
)

SESSION_PREFIX = "nereid_onnxruntime_"
SESSION_LABELS = ("model", "version")
SESSION_METRICS: Mapping[str, MetricSpec] = {
    "run_seconds": histogram("Duration of one run of the network", DURATIONS_S),
    "batch_size": histogram("Rows of one run of the network", (1, 2, 4, 8, 16, 32, 64, 128)),
    "rejected_total": counter("Rejected requests, by the code of the error", "reason"),
    "fallbacks_total": counter(
        "Batches computed differently than configured, such as in halves because memory ran out",
        "from to reason",
    ),
    "device_failures_total": counter("Instances that must be replaced, because their device failed"),
    "session_start_seconds_total": counter("Seconds that opening sessions took"),
    "sessions_total": counter("Sessions opened"),
    "warm_up_runs_total": counter("Runs at load, one for each batch size"),
    "warm_up_seconds_total": counter("Seconds of the runs at load"),
    "instances": gauge("Instances, by the execution provider in use", "provider"),
    "host_inputs_total": counter("Inputs on the host of an instance on a GPU: each is copied"),
}

ROUTE_PREFIX = "nereid_route_"
ROUTE_LABELS = ("route", "model_instance")
ROUTE_METRICS: Mapping[str, MetricSpec] = {
    "requests_total": counter(
        "Attempts on a variant, by outcome and reason", "variant version outcome reason"
    ),
    "request_duration_seconds": histogram(
        "Seconds from arrival at the route to the variant's response; `chosen` is `false` for a replacement",
        ROUTE_DURATIONS_S,
        "variant version outcome chosen",
    ),
    "in_flight": gauge("Attempts on a variant that have not returned", "variant version"),
    "late_total": counter("Attempts that returned after their deadline", "variant version"),
    "fallbacks_total": counter(
        "Responses from a variant other than the chosen one, or with the configured answer", "from to reason"
    ),
    "probes_total": counter(
        "Health checks of supervisor and gateway, which are not requests", "variant version outcome"
    ),
    "cancelled_total": counter("Requests whose client disconnected"),
    "shed_total": counter("Requests rejected because too many were in flight"),
    "breaker_state": gauge("0 closed, 1 half open, 2 open", "variant version"),
    "shadow_requests_total": counter(
        "Requests of a shadow: agreed, disagreed, failed, shed", "shadow outcome"
    ),
    "shadow_score_distance": histogram(
        "Distance of the responses of shadow and variant, such as the largest difference of one score",
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
        "shadow",
    ),
    "shadow_duration_seconds": histogram("Seconds until a shadow's response", (*DURATIONS_S, 4, 8), "shadow"),
    "shadowed_duration_seconds": histogram(
        "Seconds until the variant's response to these requests", (*DURATIONS_S, 4, 8), "shadow"
    ),
    "generation": gauge("Generation of the route in use"),
    "served_since_seconds": gauge("Unix time at which this route file came into use", "sha256"),
    "reloads_total": counter("Changes of the route file: accepted or refused", "outcome"),
}

# Signals of the quality of a model, for the comparison with a reference (docs/drift.md).
ROUTE_QUALITY_METRICS: Mapping[str, MetricSpec] = {
    "confidence": counter_histogram(
        "Probability of the best class or object, or the mean of the lines of text, 0 to 1",
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999),
        "variant version",
    ),
    "entropy": counter_histogram(
        "Entropy of the probabilities, 0 (one class) to 1 (all classes alike)",
        (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        "variant version",
    ),
    "found": counter_histogram(
        "Lines of text or objects found on an image",
        (0, 1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 45, 64, 100, 200),
        "variant version",
    ),
    "predicted_total": counter(
        "Images by best class, among the classes of the reference", "variant version class"
    ),
}

IMAGE_PREFIX = "nereid_image_"
IMAGE_LABELS = ("model", "version")
IMAGE_METRICS: Mapping[str, MetricSpec] = {
    "brightness": counter_histogram(
        "Mean luma of the network's input, 0 to 1", tuple(step / 20 for step in range(1, 20))
    ),
    "contrast": counter_histogram(
        "Standard deviation of the luma of the network's input",
        (0.02, 0.05, 0.08, 0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.22, 0.24, 0.26, 0.28, 0.3, 0.33, 0.36, 0.4),
    ),
    "sharpness": counter_histogram(
        "Mean difference of the luma of neighbouring pixels of the network's input",
        (0.002, 0.004, 0.006, 0.008, 0.011, 0.015, 0.02, 0.026, 0.033, 0.042, 0.054, 0.07, 0.09, 0.12, 0.16),
    ),
    "warmth": counter_histogram(
        "Mean red of the network's input, divided by the sum of mean red and mean blue",
        (0.3, 0.35, 0.4, 0.43, 0.46, 0.48, 0.49, 0.5, 0.51, 0.52, 0.54, 0.56, 0.58, 0.6, 0.63, 0.67, 0.75),
    ),
    "aspect": counter_histogram(
        "Width of an image divided by its height",
        (0.4, 0.5, 0.6, 0.7, 0.8, 0.95, 1.05, 1.2, 1.3, 1.4, 1.6, 1.9, 2.5),
    ),
    "megapixels": counter_histogram(
        "Pixels of an image, in millions",
        (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 1.5, 2, 3, 5, 8, 12, 16, 24, 50),
    ),
}

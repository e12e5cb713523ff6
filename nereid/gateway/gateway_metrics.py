"""Prometheus metrics of the gateway, in their own registry; label values are bounded."""

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.multiprocess import MultiProcessCollector

PREFIX = "nereid_gateway_"
# Doubled from bound to bound; 0.125 replaces 0.128, so that the later bounds include whole seconds.
DURATIONS_S = *(0.001 * 2**step for step in range(7)), *(0.125 * 2**step for step in range(9))
MAX_VARIANTS = 32
OTHER = "other"
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4.encode()


class Metrics:
    """All metrics of one gateway.

    Args:
        in_flight: returns the number of images in flight.
        waiting: returns the number of images in the queue.
        limit: returns the limit of images in flight.
        is_shared: whether the values of all workers are added up; `refresh` then updates the gauges.
    """

    def __init__(
        self,
        in_flight: Callable[[], float],
        waiting: Callable[[], float],
        limit: Callable[[], float],
        is_shared: bool = False,
    ) -> None:
        self._is_shared = is_shared
        self._gauges: list[tuple[Gauge, Callable[[], float]]] = []
        self.registry = CollectorRegistry(auto_describe=True)
        labels = ("endpoint", "model", "variant", "outcome")
        self._requests = Counter(f"{PREFIX}requests", "Requests by outcome", labels, registry=self.registry)
        self._images = Counter(f"{PREFIX}images", "Images by outcome", labels, registry=self.registry)
        self._feedback = Counter(
            f"{PREFIX}feedback",
            "Feedback about answers: correct or wrong",
            ("model", "variant", "result"),
            registry=self.registry,
        )
        self._stages = Histogram(
            f"{PREFIX}stage_seconds",
            "Duration of a stage: receive, admission, inference, or total of the request",
            ("endpoint", "model", "variant", "stage", "outcome"),
            buckets=DURATIONS_S,
            registry=self.registry,
        )
        for name, text, value in (
            ("in_flight", "Images in flight to the server", in_flight),
            ("waiting", "Images in the queue", waiting),
            ("limit", "Limit of images in flight", limit),
        ):
            gauge = Gauge(f"{PREFIX}{name}", text, registry=self.registry, multiprocess_mode="livesum")
            self._gauges.append((gauge, value))
        self._variants: set[str] = {""}
        # `labels` of prometheus_client costs more than the observation.
        self._observe: dict[tuple[str, ...], Callable[[float], None]] = {}
        self._count: dict[tuple[object, ...], Callable[[], None]] = {}

    def variant(self, name: str) -> str:
        """Return the label of a variant that has answered; beyond a limit, variants share one label."""
        if name not in self._variants:
            if len(self._variants) > MAX_VARIANTS:
                return OTHER
            self._variants.add(name)
        return name

    def count_request(
        self, endpoint: str, model: str, variant: str, outcome: str, stages_s: Mapping[str, float]
    ) -> None:
        """Count a request that has ended, and record its stages."""
        self._record(self._requests, endpoint, model, variant, outcome, stages_s)

    def count_image(
        self, endpoint: str, model: str, variant: str, outcome: str, stages_s: Mapping[str, float]
    ) -> str:
        """Count one image of a request, and record its stages; return the label of the variant."""
        if variant not in self._variants:
            variant = self.variant(variant)
        self._record(self._images, endpoint, model, variant, outcome, stages_s)
        return variant

    def _record(
        self,
        counter: Counter,
        endpoint: str,
        model: str,
        variant: str,
        outcome: str,
        stages_s: Mapping[str, float],
    ) -> None:
        labels = counter, endpoint, model, variant, outcome
        if (count := self._count.get(labels)) is None:
            count = self._count[labels] = counter.labels(endpoint, model, variant, outcome).inc
        count()
        for stage, seconds in stages_s.items():
            of_stage = endpoint, model, variant, stage, outcome
            if (observe := self._observe.get(of_stage)) is None:
                observe = self._observe[of_stage] = self._stages.labels(*of_stage).observe
            observe(seconds)

    def count_feedback(self, model: str, variant: str, is_correct: bool) -> None:
        """Count feedback about an answer as `correct` or `wrong`; both series exist from then on."""
        for result, count in (("correct", is_correct), ("wrong", not is_correct)):
            self._feedback.labels(model, variant, result).inc(count)

    def refresh(self) -> None:
        """Update the gauges."""
        for gauge, value in self._gauges:
            gauge.set(value())

    def page(self) -> bytes:
        """Return the page in Prometheus' text format, for all workers together."""
        self.refresh()
        registry = self.registry
        if self._is_shared:
            MultiProcessCollector(registry := CollectorRegistry())  # type: ignore[no-untyped-call]
        return generate_latest(registry)

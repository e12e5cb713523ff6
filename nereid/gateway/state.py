"""What all requests of one gateway share."""

from dataclasses import dataclass
from typing import Protocol, Unpack

from nereid.client.prediction import Prediction
from nereid.client.request import Options
from nereid.gateway.admission.admission import Admission
from nereid.gateway.admission.keys import KeyRing
from nereid.gateway.admission.quotas import Buckets
from nereid.gateway.gateway_metrics import Metrics
from nereid.gateway.http.upload import Uploads
from nereid.gateway.live import Live
from nereid.gateway.readiness import Readiness
from nereid.gateway.request_timings import Spent
from nereid.gateway.route_control import RouteControl, RouteView
from nereid.gateway.settings import Settings

CLIENT_CLOSED = "client_closed"


class Upstream(Protocol):
    """What classifies; `nereid.client.async_classifier.AsyncClassifier` outside of tests."""

    async def classify(self, image: bytes, **options: Unpack[Options]) -> Prediction:
        """Classify one image."""

    async def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway: its settings, the server behind it, and what it counts."""

    settings: Settings
    keys: KeyRing
    upstream: Upstream
    admission: Admission
    buckets: Buckets
    uploads: Uploads
    metrics: Metrics
    live: Live
    readiness: Readiness
    route: RouteView | None

    def count_image(self, endpoint: str, variant: str, outcome: str, spent: Spent) -> None:
        """Note what became of an image, how long it waited, and how long the server took if it was asked."""
        self.metrics.count_image(endpoint, variant, outcome)
        self.metrics.observe(endpoint, variant, "admission", outcome, spent.admission_s)
        if spent.inference_s:
            self.metrics.observe(endpoint, variant, "inference", outcome, spent.inference_s)
        self.live.note(outcome, variant, spent.total_s)


def build(settings: Settings, keys: KeyRing, route: RouteControl | None, upstream: Upstream) -> Gateway:
    """Return a gateway in front of `upstream`."""
    admission = Admission(settings.most_in_flight)
    return Gateway(
        settings,
        keys,
        upstream,
        admission,
        Buckets(settings.rate_per_s, settings.burst),
        Uploads(settings),
        Metrics(lambda: admission.in_flight, lambda: admission.waiting, lambda: admission.limit),
        Live(),
        Readiness(upstream.classify),
        RouteView(route) if route else None,
    )

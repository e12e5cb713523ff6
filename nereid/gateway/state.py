"""State that all requests of one gateway share."""

from dataclasses import dataclass
from typing import Protocol, Unpack

from nereid.client.prediction import Prediction
from nereid.client.request import Options
from nereid.gateway.admission.admission import Admission
from nereid.gateway.admission.keys import KeyRing
from nereid.gateway.admission.quotas import Quotas
from nereid.gateway.gateway_metrics import Metrics
from nereid.gateway.http.upload import Uploads
from nereid.gateway.live import Live
from nereid.gateway.readiness import Readiness
from nereid.gateway.route_control import RouteControl, RouteView
from nereid.gateway.settings import Settings

CLIENT_CLOSED = "client_closed"


class Upstream(Protocol):
    """The classifier behind the gateway, usually a `nereid.AsyncClassifier`."""

    async def classify(self, image: bytes, **options: Unpack[Options]) -> Prediction:
        """Classify one image."""

    async def close(self) -> None:
        """Close all connections to the server."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway: settings, server, limits and metrics."""

    settings: Settings
    keys: KeyRing
    upstream: Upstream
    admission: Admission
    quotas: Quotas
    uploads: Uploads
    metrics: Metrics
    live: Live
    readiness: Readiness
    route: RouteView | None

    def count_image(self, endpoint: str, variant: str, outcome: str, stages_s: dict[str, float]) -> None:
        """Record the outcome of an image and the durations of its stages."""
        self.metrics.count_image(endpoint, variant, outcome)
        for stage, seconds in stages_s.items():
            self.metrics.observe(endpoint, variant, stage, outcome, seconds)
        self.live.note(outcome, variant, sum(stages_s.values()))


def build(settings: Settings, keys: KeyRing, route: RouteControl | None, upstream: Upstream) -> Gateway:
    """Return a gateway in front of `upstream`."""
    admission = Admission(settings.max_in_flight)
    return Gateway(
        settings,
        keys,
        upstream,
        admission,
        Quotas(settings.rate_per_s, settings.burst),
        Uploads(settings),
        Metrics(lambda: admission.in_flight, lambda: admission.waiting, lambda: admission.limit),
        Live(),
        Readiness(upstream.classify),
        RouteView(route) if route else None,
    )

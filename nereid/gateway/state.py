"""State that all requests of one gateway share."""

import asyncio
from dataclasses import dataclass

from nereid.gateway.admission.admission import Admission
from nereid.gateway.admission.keys import KeyRing
from nereid.gateway.admission.quotas import Quotas
from nereid.gateway.admission.turns import Turns
from nereid.gateway.gateway_metrics import Metrics
from nereid.gateway.http.upload import Uploads
from nereid.gateway.models import Models, OfferedModel
from nereid.gateway.settings import Settings
from nereid.gateway.v2.upstream import TritonHttp

CLIENT_CLOSED = "client_closed"


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway: settings, models, limits and metrics."""

    settings: Settings
    keys: KeyRing
    models: Models
    admission: Admission
    quotas: Quotas
    uploads: Uploads
    metrics: Metrics
    previewing: asyncio.Lock
    unpacking: Turns
    triton: TritonHttp

    def count_image(
        self, endpoint: str, model: OfferedModel, variant: str, outcome: str, stages_s: dict[str, float]
    ) -> None:
        """Record the outcome of an image and the durations of its stages."""
        self.metrics.count_image(endpoint, model.name, variant, outcome)
        for stage, seconds in stages_s.items():
            self.metrics.observe(endpoint, model.name, variant, stage, outcome, seconds)
        model.live.note(outcome, variant, sum(stages_s.values()))


def build(settings: Settings, keys: KeyRing, models: Models) -> Gateway:
    """Return a gateway in front of models."""
    admission = Admission(settings.max_in_flight)
    return Gateway(
        settings,
        keys,
        models,
        admission,
        Quotas(settings.rate_per_s, settings.burst),
        Uploads(settings),
        Metrics(lambda: admission.in_flight, lambda: admission.waiting, lambda: admission.limit),
        asyncio.Lock(),
        Turns(lambda: 1),
        TritonHttp(settings.url),
    )

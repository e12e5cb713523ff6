"""State shared by all requests of one gateway."""

import time
from dataclasses import dataclass

from nereid.base.tracing.records import Tracer
from nereid.gateway.admission import Admission, FairQueue
from nereid.gateway.gateway_metrics import LiveState, Metrics
from nereid.gateway.http.upload import Uploads
from nereid.gateway.keys import KeyRing, Quotas
from nereid.gateway.models import Models, OfferedModel
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.shared_tables import RecentPredictions
from nereid.gateway.workers import Report, SharedState


@dataclass(frozen=True, slots=True)
class Gateway:
    """One gateway: settings, models, limits and metrics."""

    settings: GatewaySettings
    keys: KeyRing
    models: Models
    admission: Admission
    quotas: Quotas
    uploads: Uploads
    metrics: Metrics
    previews: Admission
    decompressions: FairQueue
    requires_keys: bool
    recent_predictions: RecentPredictions
    tracer: Tracer | None = None
    shared: SharedState | None = None

    def report(self) -> None:
        """Update what this gateway's other workers see."""
        if self.shared:
            models = {name: model.recent_load.window() for name, model in self.models.known.items()}
            in_flight, limit = self.admission.in_flight, self.admission.limit
            self.shared.report(Report(time.monotonic(), in_flight, limit, models))
            self.metrics.refresh()

    def live_state(self, model: OfferedModel) -> LiveState:
        """Return a model's load in the last minute, across all workers."""
        reports = [*self.shared.others()] if self.shared else []
        in_flight = self.admission.in_flight + sum(report.in_flight for report in reports)
        limit = self.admission.limit + sum(report.limit for report in reports)
        other_windows = [report.models[model.name] for report in reports if model.name in report.models]
        ready = model.readiness.latest()
        is_ready, reason = (None, "") if ready is None else (ready.ready, ready.reason)
        return model.recent_load.state(in_flight, limit, is_ready, reason, other_windows)


def build(
    settings: GatewaySettings, keys: KeyRing, models: Models, shared: SharedState | None = None
) -> Gateway:
    """Return a gateway in front of models; `shared` is the state of its workers if it has several."""
    if shared:
        settings = shared.settings(settings)
        shared.share_metrics()
    admission = Admission(settings.max_in_flight)
    in_work = (lambda: admission.in_flight), (lambda: admission.waiting), (lambda: admission.limit)
    return Gateway(
        settings=settings,
        keys=keys,
        models=models,
        admission=admission,
        quotas=Quotas(settings.rate_per_s, settings.burst, shared.buckets if shared else None),
        uploads=Uploads(settings),
        metrics=Metrics(*in_work, is_shared=shared is not None),
        previews=Admission(1),
        decompressions=FairQueue(lambda: 1),
        requires_keys=settings.requires_keys,
        recent_predictions=shared.recent_predictions if shared else RecentPredictions(),
        tracer=Tracer(settings.traces, settings.sampling) if settings.traces else None,
        shared=shared,
    )

"""State shared by all requests of one gateway."""

import time

from nereid.base.tracing.records import Tracer
from nereid.gateway.admission import Admission, FairQueue
from nereid.gateway.gateway_metrics import LiveState, Metrics
from nereid.gateway.http.upload import Uploads
from nereid.gateway.keys import KeyRing, Quotas
from nereid.gateway.models import Models, OfferedModel
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.shared_tables import RecentPredictions
from nereid.gateway.workers import Report, SharedState


class Gateway:
    """One gateway: settings, models, limits and metrics.

    Args:
        shared: the state of its workers if it has several.
    """

    def __init__(
        self, settings: GatewaySettings, keys: KeyRing, models: Models, shared: SharedState | None = None
    ) -> None:
        if shared:
            settings = shared.settings(settings)
            shared.share_metrics()
        self.settings, self.keys, self.models, self.shared = settings, keys, models, shared
        self.requires_keys = settings.requires_keys
        self.admission, self.previews = Admission(settings.max_in_flight), Admission(1)
        self.decompressions = FairQueue(lambda: 1)
        self.quotas = Quotas(settings.rate_per_s, settings.burst, shared.buckets if shared else None)
        self.uploads = Uploads(settings)
        self.metrics = Metrics(self.admission, is_shared=shared is not None)
        self.recent_predictions = shared.recent_predictions if shared else RecentPredictions()
        self.tracer = Tracer(settings.traces, settings.sampling) if settings.traces else None

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

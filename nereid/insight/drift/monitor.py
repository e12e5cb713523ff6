"""The drift monitor: polls the metrics page of a server, and compares the last hour with references."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from nereid.backends.routing.reference_file import ReferenceWatch, path_of
from nereid.base import prometheus_text
from nereid.base.errors import InvalidConfig, OperationFailed
from nereid.base.prometheus_text import MetricLabels, MetricSamples, gauge
from nereid.insight.drift import comparison, recording
from nereid.insight.drift.comparison import MEASURES, VariantDrift, targets_of, why_not_compared
from nereid.insight.drift.recording import PREFIXES, History, RecordedInterval, series_counts
from nereid.models.routes.location import RouteLocation, find_routes
from nereid.server.run_dir import ServerInfo

STATE_FILE = "drift.json"
PAGE_TIMEOUT_S = 10.0
# Seconds between checks for a due poll, so that the first window begins soon after the start.
CHECK_INTERVAL_S = 5.0
# Seconds between polls, and seconds of the window.
INTERVAL_S, WINDOW_S = 60.0, 3600.0
PREFIX = "nereid_drift_"
METRICS = {
    "score": gauge("Distance of a signal of the last hour from its reference.", "signal measure"),
    "limit": gauge(
        "Distance that chance alone exceeds in at most 1 of 10,000 evaluations.", "signal measure"
    ),
    "window_requests": gauge("Classified images of a variant in the last hour."),
    "reference_age_seconds": gauge("Age of the reference of a variant."),
    "last_request_seconds": gauge("Seconds since the number of classified images last grew."),
}
LABELS = ("route", "variant")


class RouteDrift(Struct, frozen=True):
    """The variants of one route; `problem` is why the route cannot be compared."""

    route: str
    source: str
    variants: tuple[VariantDrift, ...] = ()
    problem: str = ""


class DriftState(Struct, frozen=True):
    """The result of a poll at Unix time `at`, over the last `window_s`, of which `covered_s` are recorded."""

    at: float
    window_s: float
    covered_s: float
    routes: tuple[RouteDrift, ...]


# A running server, and its run directory.
MonitoredServer: TypeAlias = tuple[ServerInfo, Path]


@dataclass
class Monitor:
    """Polls one repository's server.

    Args:
        log: receives a line when a signal starts or stops exceeding its limit.
        unix_time: seconds since 1970.
    """

    repository: Path
    find_server: Callable[[], MonitoredServer | None]
    log: Callable[[str], None]
    unix_time: Callable[[], float] = time.time
    history: History = field(default_factory=History)
    state: DriftState | None = None
    _samples: MetricSamples | None = None
    _pid: int = 0
    _sampled_at: float = 0.0
    _watches: dict[str, ReferenceWatch] = field(default_factory=dict)
    _drifting: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    _logged_error: str = ""
    _references: list[tuple[str, int]] = field(default_factory=list)

    def is_due(self) -> bool:
        """Return whether the interval is over, no poll has succeeded yet, or a reference has changed."""
        is_over = self.unix_time() - self._sampled_at >= INTERVAL_S
        return self.state is None or is_over or self._references != self._signature()

    def poll(self) -> None:
        """Record the increase since the last poll and compare it; a repeated error is logged once."""
        try:
            self._poll()
            self._logged_error = ""
        except Exception as error:
            # An unforeseen error is logged; it must not end the monitor.
            text = f"drift: {type(error).__name__}: {error}"
            if text != self._logged_error:
                self.log(text)
            self._logged_error = text

    def _poll(self) -> None:
        locations = find_routes(self.repository)
        server = self.find_server() if locations else None
        if server is None:
            return
        server_info, folder = server
        now, self._references = self.unix_time(), self._signature()
        self._record(server_info, now)
        _, covered_s = self.history.window(now, WINDOW_S)
        routes = tuple(self._route(location, server_info.profile, now) for location in locations)
        self.state = DriftState(now, WINDOW_S, covered_s, routes)
        self._report(self.state)
        with contextlib.suppress(FileNotFoundError):  # the server has just ended
            self.history.store(folder)
            recording.replace_unsynced(folder / STATE_FILE, msgspec.json.encode(self.state))

    def _signature(self) -> list[tuple[str, int]]:
        stamps = []
        for path in self.repository.glob(path_of(Path(), "*").name):
            with contextlib.suppress(OSError):
                stamps.append((path.name, path.stat().st_mtime_ns))
        return sorted(stamps)

    def _record(self, server_info: ServerInfo, now: float) -> None:
        """Append the increase since the last page of this server; a new server's first page is the base."""
        samples = MetricSamples.parse(
            prometheus_text.fetch(server_info.url("metrics"), PAGE_TIMEOUT_S), PREFIXES
        )
        if self._samples:
            # A server that started since the last poll counts from zero.
            increase = samples - self._samples if server_info.pid == self._pid else samples
            seconds = min(now - self._sampled_at, 2 * INTERVAL_S)
            self.history.slots.append(RecordedInterval(now, seconds, series_counts(increase)))
        self._samples, self._pid, self._sampled_at = samples, server_info.pid, now

    def _route(self, location: RouteLocation, profile: str, now: float) -> RouteDrift:
        watch = self._watches.setdefault(
            location.name, ReferenceWatch(path_of(self.repository, location.name))
        )
        try:
            watch.poll()
            targets = targets_of(location, profile)
        except (OperationFailed, InvalidConfig, OSError) as error:
            return RouteDrift(location.name, "", problem=str(error))
        reference, variants = watch.reference, []
        window, _ = self.history.window(now, WINDOW_S, watch.stored)
        for target in targets:
            grew = self.history.last_increase(target.series(""))
            problem = watch.problem or why_not_compared(target, reference)
            signals: Any = ()
            if reference and not problem:
                signals = comparison.compare(target, window, reference)
            variants.append(
                VariantDrift(
                    target.name,
                    target.model,
                    target.version,
                    target.requests(window),
                    None if grew is None else now - grew,
                    now - reference.created.timestamp() if reference else None,
                    problem,
                    signals,
                )
            )
        return RouteDrift(location.name, reference.source if reference else "", tuple(variants))

    def _report(self, state: DriftState) -> None:
        for route in state.routes:
            for variant in route.variants:
                key = route.route, variant.variant
                over = tuple(signal.signal for signal in variant.signals if signal.verdict == "drift")
                if over != self._drifting.get(key, ()):
                    text = f"exceeds its limit: {', '.join(over)}" if over else "has no signal over its limit"
                    self.log(f"drift: variant '{variant.variant}' of '{route.route}' {text}")
                self._drifting[key] = over


def watch(monitor: Monitor, stop: threading.Event) -> None:
    """Poll when one is due, until `stop` is set."""
    while not stop.wait(CHECK_INTERVAL_S):
        if monitor.is_due():
            monitor.poll()


def metrics(state: DriftState | None) -> str:
    """Return the samples of all variants with a reference in Prometheus' text format; nothing without one."""
    if state is None:
        return ""
    samples = {
        key: value
        for route in state.routes
        for variant in route.variants
        if not variant.problem
        for key, value in _drift_samples(route.route, variant)
    }
    return prometheus_text.render(samples, PREFIX, METRICS) if samples else ""


def _drift_samples(route: str, variant: VariantDrift) -> Iterator[tuple[tuple[str, MetricLabels], float]]:
    labels: MetricLabels = (("route", route), ("variant", variant.variant))
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

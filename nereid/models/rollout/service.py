"""The loop around the controllers of a repository's routes, in `nereid serve` or alone, and its metrics."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from nereid.base import files, prometheus_text
from nereid.base.errors import OperationFailed
from nereid.base.prometheus_text import MetricLabels, gauge
from nereid.models.rollout.commands import CONTROLLER_LOCK
from nereid.models.rollout.controller import POLL_S, Controller, FindServer
from nereid.models.rollout.rollout_journal import Rollout, active_rollouts, folder_of, routes_of
from nereid.models.routes.location import find_route

# A second controller tries to take the lock at this interval.
LOCK_RETRY_INTERVAL_S, LOCK_TIMEOUT_S = 2.0, 0.1
# An idle server looks for a new rollout at this interval.
IDLE_POLL_INTERVAL_S = 2.0
PREFIX = "nereid_rollout_"
# The labels of each metric.
LABELS = ("route", "candidate")
METRICS = {
    "active": gauge("1 while a rollout of the route is active."),
    "paused": gauge("1 while the rollout is paused."),
    "share": gauge("Part of the traffic that the candidate has in this step, 0 to 1."),
    "step": gauge("Number of the step, from 0."),
    "step_seconds": gauge("Measured time of this step."),
    "candidate_requests": gauge("Requests of the candidate in this step."),
}
Log = Callable[[str], None]


def run(repository: Path, find_server: FindServer, stop: threading.Event, log: Log) -> None:
    """Carry out all rollouts of a repository until `stop` is set, unless another process does."""
    folder = folder_of(repository)
    while not stop.is_set():
        if not folder.is_dir():  # the first rollout creates it
            stop.wait(IDLE_POLL_INTERVAL_S)
            continue
        try:
            with files.locked_file(folder / CONTROLLER_LOCK, "nereid rollout controller", LOCK_TIMEOUT_S):
                _control(repository, find_server, stop, log)
        except files.LockTimeout:
            stop.wait(LOCK_RETRY_INTERVAL_S)
        except OSError as error:
            log(f"rollout: {error}")
            stop.wait(LOCK_RETRY_INTERVAL_S)


def _control(repository: Path, find_server: FindServer, stop: threading.Event, log: Log) -> None:
    controllers: dict[str, Controller] = {}
    last_signature: object = None
    is_busy, logged_error = False, ""
    while not stop.wait(POLL_S if is_busy else IDLE_POLL_INTERVAL_S):
        now = _signature(folder_of(repository))
        if now == last_signature and not is_busy:
            continue
        last_signature, is_busy = now, False
        for route in routes_of(repository):
            try:
                if route not in controllers:
                    controllers[route] = Controller(find_route(repository, route), find_server, log)
                is_busy |= controllers[route].step()
            except Exception as error:
                # An unforeseen error of one route is logged; it must not stop the others.
                is_busy, text = True, f"{route}: {type(error).__name__}: {error}"
                if text != logged_error:
                    log(f"rollout {text}")
                logged_error = text


def _signature(folder: Path) -> list[tuple[str, int, int]]:
    entries = []
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            status = path.stat()
            entries.append((path.name, status.st_size, status.st_mtime_ns))
    return sorted(entries)


def metrics(repository: Path) -> str:
    """Return the samples of all active rollouts in Prometheus' text format; nothing without one."""
    try:
        rollouts = active_rollouts(repository)
    except (OperationFailed, OSError):  # the controller logs it
        return ""
    samples: dict[tuple[str, MetricLabels], float] = {
        (name, (("route", route), ("candidate", rollout.plan.candidate))): value
        for route, rollout in rollouts.items()
        for name, value in _values(rollout).items()
    }
    return prometheus_text.render(samples, PREFIX, METRICS) if samples else ""


def _values(rollout: Rollout) -> dict[str, float]:
    counts = rollout.look.events.values() if rollout.look else ()
    return {
        "active": 1.0,
        "paused": float(rollout.phase == "paused"),
        "share": rollout.share,
        "step": float(rollout.step),
        "step_seconds": rollout.elapsed_s,
        "candidate_requests": float(max((candidate.requests for candidate, _ in counts), default=0)),
    }

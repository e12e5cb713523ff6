"""Commands for a rollout: start, pause, resume, promote and abort, and a forecast before the start.

A command is written to the journal, and the controller acts. Without a running controller, the caller itself
carries out what cannot wait: the withdrawal of a candidate.
"""

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from nereid.base import files
from nereid.base.errors import OperationFailed, WrongUsage, no_server
from nereid.base.prometheus_text import MetricSamples
from nereid.models.rollout import judge, measurement
from nereid.models.rollout.controller import POLL_S, Controller, FindServer, find_pair, first_step
from nereid.models.rollout.measurement import ERROR, step_limits
from nereid.models.rollout.plan import BOUNDS, SHADOW, Pair, RolloutPlan
from nereid.models.rollout.rollout_journal import (
    Phase,
    Rollout,
    RolloutJournals,
    check_none_active,
    folder_of,
)
from nereid.models.routes.change import read_samples
from nereid.models.routes.location import RouteLocation, load_current_route, read_route_file
from nereid.server.run_dir import ServerInfo

Command = Literal["pause", "resume", "promote", "abort"]
ALLOWED_PHASES: dict[Command, tuple[Phase, ...]] = {
    "pause": ("stepping", "measuring"),
    "resume": ("paused",),
    "promote": ("stepping", "measuring", "paused"),
    "abort": ("stepping", "measuring", "paused"),
}
CONTROLLER_LOCK = "controller.lock"
FORECAST_S = 10.0
SLOW_MEDIAN_RATIO = 1.2
FINISH_TIMEOUT_S = 15.0
CONTROLLER_START_TIMEOUT_S = 5.0


class CommandRefused(OperationFailed):
    """The state of the rollout does not allow a command."""


class Forecast(Struct, frozen=True):
    """What a step needs at the current traffic: requests of all callers, and seconds (may be infinite)."""

    step: str
    requests: int
    seconds: float
    limited_by: str


def start(
    location: RouteLocation, plan: RolloutPlan, server_info: ServerInfo | None, reason: str = ""
) -> Rollout:
    """Write the start of a rollout; the controller starts with its first step.

    Raises:
        WrongUsage: the candidate or the route does not fit.
        OperationFailed: another rollout of the repository is active, or no server responds.
    """
    check_none_active(location.repository, f"start a rollout of '{plan.candidate}'")
    loaded = load_current_route(location, read_route_file(location))
    pair, first = find_pair(loaded, plan.candidate), first_step(loaded.route, plan)
    slow_s = _slow_s(plan, _samples(location, server_info), pair)
    journals = RolloutJournals.of(location)
    number = max(journals.numbers(), default=0) + 1
    risk = plan.risk / (len(plan.steps) - first)
    with journals.writing(number) as writer:
        if writer.rollout:
            raise CommandRefused("another command has just started a rollout", "nereid rollout status")
        writer.write(
            "start", [reason] if reason else (), plan=plan, pair=pair, slow_s=slow_s, risk=risk, first=first
        )
        return writer.started


def issue(location: RouteLocation, action: Command, reason: str = "") -> Rollout:
    """Write a command into the journal of the active rollout.

    Raises:
        OperationFailed: no rollout is active, or its phase does not allow the command.
    """
    journals = RolloutJournals.of(location)
    active = journals.active()
    if active is None:
        raise CommandRefused(f"route '{location.name}' has no active rollout")
    with journals.writing(active.number) as writer:
        if writer.started.phase not in ALLOWED_PHASES[action]:
            raise CommandRefused(f"cannot {action}: {writer.started}")
        writer.write(action, (reason,) if reason else (f"{action} by hand",))
        return writer.started


def finish(location: RouteLocation, find_server: FindServer, log: Callable[[str], None]) -> Rollout:
    """Wait until an aborted rollout has ended; without a controller, withdraw the candidate here.

    Raises:
        OperationFailed: the candidate still has traffic.
    """
    journals, deadline = RolloutJournals.of(location), time.monotonic() + FINISH_TIMEOUT_S
    while (rollout := journals.active()) and rollout.phase == "withdrawing" and time.monotonic() < deadline:
        if not is_controlled(location):
            Controller(location, find_server, log).step()
        time.sleep(0.1)
    rollout = journals.latest()
    if rollout is None or rollout.is_active:
        raise OperationFailed(
            f"the candidate still has traffic after {FINISH_TIMEOUT_S:g} s", "nereid rollout status"
        )
    return rollout


def is_controlled(location: RouteLocation) -> bool:
    """Return whether a controller serves the route's repository."""
    lock = folder_of(location.repository) / CONTROLLER_LOCK
    return lock.exists() and files.is_locked(lock)


def wait_controlled(location: RouteLocation) -> bool:
    """Return whether a controller serves the route's repository; wait a few seconds for a new one.

    Raises:
        OSError: the folder of the journals cannot be created.
    """
    folder_of(location.repository).mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + CONTROLLER_START_TIMEOUT_S
    while not (has_controller := is_controlled(location)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return has_controller


def forecast(
    location: RouteLocation, plan: RolloutPlan, server_info: ServerInfo | None, seconds: float = FORECAST_S
) -> list[Forecast]:
    """Measure the current traffic, and return what each step needs for an equally good candidate.

    Raises:
        WrongUsage: the candidate or the route does not fit.
        OperationFailed: no server responds.
    """
    loaded = load_current_route(location, read_route_file(location))
    pair, first = find_pair(loaded, plan.candidate), first_step(loaded.route, plan)
    before = _samples(location, server_info)
    time.sleep(seconds)
    after = _samples(location, server_info)
    if after.was_reset(before, measurement.COUNTERS):
        raise OperationFailed("the server has restarted during the measurement", "run the command again")
    counts = measurement.count_pair(after - before, pair, _slow_s(plan, after, pair))
    errors = counts.events[ERROR][1].rate
    rate = sum(sum(buckets) for buckets in counts.latencies) / seconds
    begin = Rollout(0, plan, pair, 0.0, plan.risk, datetime.now(UTC), "")
    return [_forecast(begin, number, rate, errors) for number in range(first, len(plan.steps))]


def _forecast(begin: Rollout, number: int, rate: float, error_rate: float) -> Forecast:
    rollout = replace(begin, step=number)
    plan, share = rollout.plan, rollout.share
    part = plan.shadow_percent / 100 if plan.steps[number] == SHADOW else share
    needed, min_s = {"min_requests": plan.min_requests / part}, plan.hold_s
    for limit in step_limits(rollout).events if share < 1 else ():
        if limit.is_in_blocks:
            min_s = max(min_s, judge.polls_needed(limit, 1 - plan.power) * POLL_S)
        elif limit.increase is not None:
            needed[limit.event] = judge.requests_needed(limit, share, error_rate, 1 - plan.power)
        else:
            # Without events, each request multiplies the evidence by at most 1 / (1 - limit).
            needed[limit.event] = math.log(10 / (1 - plan.power)) / -math.log1p(-0.9 * limit.max_rate) / part
    limited_by, requests = max(needed.items(), key=lambda pair: pair[1])
    seconds = max(min_s, requests / rate) if rate else math.inf
    return Forecast(rollout.step_name, math.ceil(requests), seconds, limited_by)


def _slow_s(plan: RolloutPlan, samples: MetricSamples, pair: Pair) -> float:
    """Return the bound of a bucket: the first at or above `slo_ms`, or one just above the control's median.

    At the median itself, a difference of a few percent could move all requests of a steady service.
    """
    median_s = judge.median(BOUNDS, measurement.count_pair(samples, pair, BOUNDS[0]).latencies[1])
    if not plan.slo_ms and math.isnan(median_s):
        raise CommandRefused(
            f"'{pair.control[0]}' has answered no request yet, so its median is unknown", "--slo-ms"
        )
    wanted_s = plan.slo_ms / 1000 or SLOW_MEDIAN_RATIO * median_s
    above = [bound for bound in BOUNDS if bound >= wanted_s]
    if not above:
        raise WrongUsage(f"expected slo_ms up to {BOUNDS[-1] * 1000:g}, got {wanted_s * 1000:g}")
    return above[0]


def _samples(location: RouteLocation, server_info: ServerInfo | None) -> MetricSamples:
    if server_info is None:
        raise no_server(location.repository)
    return read_samples(server_info, location.name)

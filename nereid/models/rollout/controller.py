"""The controller of a route's rollout: it measures, judges, and changes the weights.

Every event is journalled before it takes effect, and every effect can be repeated, so a killed controller
continues where it stopped. Only one controller of a route is active at a time.
"""

import contextlib
import http.client
import shlex
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import msgspec
from msgspec.structs import replace

from nereid.backends.routing import route_file
from nereid.backends.routing.assignment import LoadedRoute, Route, Shadow, Variant, shares, with_default
from nereid.base.errors import InvalidConfig, OperationFailed, WrongUsage
from nereid.models.rollout.judge import StepOutcome, StepVerdict
from nereid.models.rollout.measurement import Measurement, MetricsSnapshot
from nereid.models.rollout.plan import SHADOW, Pair, RolloutPlan
from nereid.models.rollout.rollout_journal import BUSY, Event, Rollout, RolloutJournals
from nereid.models.routes.change import (
    SERVED_STATUS,
    Proposal,
    Propose,
    Superseded,
    change,
    change_with_retry,
    differences,
    plan,
    served_status,
)
from nereid.models.routes.location import (
    RouteFileSnapshot,
    RouteLocation,
    load_current_route,
    read_route_file,
)
from nereid.server.model_control import ModelControl, NotReached
from nereid.server.run_dir import ServerInfo

HOOK_TIMEOUT_S = 60.0
POLL_S = 1.0
# Evaluations without a decision are written at intervals of this fraction of the step's duration.
LOG_INTERVAL_FRACTION = 0.01
FindServer = Callable[[], ServerInfo | None]


def run_hook(hook: str, event: str, rollout: Rollout) -> None:
    """Run a hook and wait for it to finish; an empty one does nothing.

    Args:
        hook: a command, without a shell, that gets the JSON on stdin; or a URL that gets it as a POST.
        event: `before_step` or `after_decision`.

    Raises:
        OperationFailed: the hook failed, or did not finish within a minute.
    """
    if not hook:
        return
    body = msgspec.json.encode({"event": event, "rollout": rollout})
    try:
        if hook.startswith("http://"):
            _post(hook, body)
        else:
            subprocess.run(
                shlex.split(hook), input=body, check=True, timeout=HOOK_TIMEOUT_S, capture_output=True
            )
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise OperationFailed(
            f"hook {event} '{hook}' ended with status {error.returncode}: {lines[-1]}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
        raise OperationFailed(f"hook {event} '{hook}' failed: {error}") from None


def _post(url: str, body: bytes) -> None:
    # The address is on this machine or its network, so no proxy is used.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    opener.open(request, timeout=HOOK_TIMEOUT_S).close()


class ControlGone(OperationFailed):
    """The route no longer has a control that could take over the candidate's traffic."""


def find_pair(loaded: LoadedRoute, candidate: str, control: str = "") -> Pair:
    """Return the candidate and its control: the only other variant with traffic, or the given one.

    Raises:
        WrongUsage: the candidate does not exist, or none or several of the other variants have traffic.
    """
    variants = loaded.route.variants
    known = ", ".join(variant.name for variant in variants)
    if candidate not in (variant.name for variant in variants):
        raise WrongUsage(f"unknown candidate '{candidate}': expected a variant of the route, {known}")
    others = [
        variant.name
        for variant in variants
        if variant.name != candidate and (variant.name == control if control else variant.weight)
    ]
    if len(others) != 1:
        raise WrongUsage(
            f"expected one variant with traffic as the control of '{candidate}', got "
            f"{', '.join(others) or 'none'}; fix: nereid route set, with weight 0 for the others"
        )
    shadow = f"rollout-{candidate}"[:64]
    if shadow in (variant.name for variant in variants):
        raise WrongUsage(f"expected no variant '{shadow}', the name of the rollout's shadow; fix: rename it")
    versions = loaded.network_versions
    return Pair((candidate, versions[candidate]), (others[0], versions[others[0]]), shadow)


def first_step(route: Route, plan: RolloutPlan) -> int:
    """Return the first step above the candidate's current share, so that no sticky key moves back.

    Raises:
        WrongUsage: the candidate already has all traffic.
    """
    current = shares(route)[plan.candidate] * 100
    for number, step in enumerate(plan.steps):
        if (step == SHADOW and not current) or (step != SHADOW and step > current + 1e-9):
            return number
    raise WrongUsage(f"'{plan.candidate}' already receives all traffic of the route")


def propose_step(rollout: Rollout) -> Propose:
    """Propose the current route with the weights and the shadow of a rollout's step."""
    share, plan = rollout.share, rollout.plan
    is_shadow = plan.steps[rollout.step] == SHADOW

    def propose(current: RouteFileSnapshot) -> Proposal:
        route = current.route()
        target = _variant(route, plan.candidate)
        shadow = Shadow(
            rollout.pair.shadow, target.model, target.version, plan.shadow_percent, target.deadline_ms
        )
        note = f"rollout of {plan.candidate}: {rollout.step_name}"
        return Proposal(_with(route, rollout.pair, share, (shadow,) if is_shadow else ()), note)

    return propose


def propose_withdrawal(rollout: Rollout) -> Propose:
    """Propose the current route without traffic for the candidate."""

    def propose(current: RouteFileSnapshot) -> Proposal:
        note = f"rollout of {rollout.plan.candidate}: {rollout.result}"
        route, control = current.route(), rollout.pair.control[0]
        if control not in (variant.name for variant in route.variants):
            raise ControlGone(f"the route has no variant '{control}' any more, so its weights stay")
        route = _with(route, rollout.pair, 0.0, ())
        # The default must be ready, and replaces failing variants.
        default = control if route.default == rollout.plan.candidate else route.default
        return Proposal(with_default(route, default), note)

    return propose


def _variant(route: Route, name: str) -> Variant:
    matches = [variant for variant in route.variants if variant.name == name]
    if not matches:
        raise WrongUsage(f"the route has no variant '{name}' any more")
    return matches[0]


def _with(route: Route, pair: Pair, share: float, shadows: tuple[Shadow, ...]) -> Route:
    """Return a route with the share of the candidate, 0 to 1, and only these shadows of the rollout."""
    weights = {pair.candidate[0]: _weight(share), pair.control[0]: _weight(1 - share)}
    variants = tuple(
        replace(variant, weight=weights.get(variant.name, variant.weight)) for variant in route.variants
    )
    other_shadows = tuple(shadow for shadow in route.shadows if shadow.name != pair.shadow)
    return replace(route, variants=variants, shadows=(*other_shadows, *shadows))


def _weight(share: float) -> float:
    percent = round(share * 100, 6)
    return int(percent) if percent == int(percent) else percent


class _Edited(OperationFailed):
    """The route was changed outside the rollout."""


class _Overtaken(OperationFailed):
    """A command has changed the rollout."""


class Controller:
    """Carries out the rollouts of one route, one poll at a time."""

    def __init__(
        self,
        location: RouteLocation,
        find_server: FindServer,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._location = location
        self._find_server = find_server
        self._log = log
        self._clock = clock
        self.journals = RolloutJournals.of(location)
        self._measurement: Measurement | None = None
        self._written_at = float("-inf")
        self._wait_reason = ""

    def step(self) -> bool:
        """Do what is due now; return whether the rollout is busy, so that the next poll is due soon.

        Raises:
            OperationFailed: a journal is damaged.
        """
        rollout = self.journals.active()
        if rollout is None or rollout.phase not in BUSY:
            self._measurement = None
            return False
        try:
            if rollout.phase == "measuring":
                self._poll(rollout)
                rollout = self.journals.active() or rollout
            elif rollout.phase == "stepping":
                self._begin(rollout)
            if rollout.phase == "withdrawing":
                self._withdraw(rollout)
        except (OperationFailed, InvalidConfig, OSError) as error:
            self._wait(rollout, str(error))
        return True

    def _begin(self, rollout: Rollout) -> None:
        self._measurement = None
        server_info, current = self._server_info(), read_route_file(self._location)
        if not rollout.intended:
            if rollout.sha256 and current.sha256 != rollout.sha256:
                self._pause_for_edit(rollout, current)
                return
            if not self._announce(rollout, current):
                return
        propose = self._guard(rollout, rollout.intended or current.sha256)
        try:
            planned = plan(self._location, propose)
            self._log(f"rollout {change(self._location, propose, server_info)}")
        except _Edited:
            self._pause_for_edit(rollout, read_route_file(self._location))
        except (_Overtaken, Superseded):
            pass  # the next poll sees the new state
        except NotReached:
            raise
        except (OperationFailed, InvalidConfig) as error:
            self._on_refusal(rollout, server_info, str(error))
        else:
            loaded = planned.loaded if planned.is_needed else planned.current
            self._write(rollout, "begin", sha256=loaded.sha256)

    def _announce(self, rollout: Rollout, current: RouteFileSnapshot) -> bool:
        """Write a route change to the journal after its hook; return whether the change may happen."""
        loaded = load_current_route(self._location, current)
        pair = find_pair(loaded, rollout.plan.candidate, rollout.pair.control[0])
        if pair != rollout.pair:
            expected, got = (
                f"version {compared_pair.candidate[1]} against {compared_pair.control[1]}"
                for compared_pair in (rollout.pair, pair)
            )
            self._write(rollout, "pause", (f"expected the variants of the start, {expected}, got {got}",))
            return False
        try:
            run_hook(rollout.plan.hooks.before_step, "before_step", rollout)
        except OperationFailed as error:
            self._say(str(error))
            self._write(rollout, "pause", ("the hook before_step failed, see the log",))
            return False
        return self._write(rollout, "change", sha256=current.sha256)

    def _guard(self, rollout: Rollout, allowed: str) -> Propose:
        """Return a proposal for the route file `allowed`, or for one that already has the step's weights."""
        proposed = propose_step(rollout)

        def propose(current: RouteFileSnapshot) -> Proposal:
            now = self.journals.read(rollout.number)
            if now is None or (now.phase, now.step) != (rollout.phase, rollout.step):
                raise _Overtaken("a command has changed the rollout")
            proposal = proposed(current)
            if current.sha256 != allowed and current.differs_from(proposal.route):
                raise _Edited("the route was changed outside the rollout")
            return proposal

        return propose

    def _on_refusal(self, rollout: Rollout, server_info: ServerInfo, reason: str) -> None:
        """Roll back if the candidate is not ready; another refusal is not the candidate's fault."""
        route = read_route_file(self._location).route()
        candidate = next(
            (variant for variant in route.variants if variant.name == rollout.plan.candidate), None
        )
        if candidate and ModelControl(server_info).is_ready(candidate.model, candidate.version):
            self._say(reason)
            self._write(rollout, "pause", ("the server does not serve the step, see the log",))
        else:
            self._decide(rollout, StepVerdict(StepOutcome.FAIL, (f"the candidate is not ready: {reason}",)))

    def _withdraw(self, rollout: Rollout) -> None:
        """Take all traffic from the candidate; without a server, the file is changed for its next start."""
        server_info, reasons = self._find_server(), rollout.reasons
        try:
            text = self._withdraw_traffic(rollout, server_info)
        except ControlGone as error:
            text, reasons = f"{self._location.name}: {error}", (*reasons, str(error))
        else:
            status, _ = served_status(
                server_info, self._location.name, read_route_file(self._location).sha256
            )
            if server_info and status != SERVED_STATUS:
                raise NotReached(f"the route without the candidate is {status}")
        self._log(f"rollout {text}")
        self._write(rollout, "end", reasons)

    def _withdraw_traffic(self, rollout: Rollout, server_info: ServerInfo | None) -> str:
        """Change the route file, even if the server does not respond; return a line about it."""
        try:
            return change_with_retry(self._location, propose_withdrawal(rollout), server_info)
        except NotReached:
            return change_with_retry(self._location, propose_withdrawal(rollout), None)

    def _poll(self, rollout: Rollout) -> None:
        if sha256(route_file.read(self._location.path)[0]).hexdigest() != rollout.sha256:
            self._pause_for_edit(rollout, read_route_file(self._location))
            return
        snapshot = MetricsSnapshot.read(self._server_info(), self._location.name)
        now_s = self._clock()
        if snapshot.served.sha256s != {rollout.sha256}:
            self._measurement = None  # the counts belong to another route
            raise NotReached("the server does not use the route of this step yet")
        if self._measurement is None or not self._measurement.is_of(rollout):
            open_s = read_route_file(self._location).route().breaker.open_s
            self._measurement, self._written_at = Measurement(rollout, now_s, open_s), float("-inf")
        measured = self._measurement
        if not measured.add(snapshot, now_s):
            return
        verdict = measured.verdict()
        is_over = verdict.outcome != StepOutcome.CONTINUE
        if is_over or now_s - self._written_at >= max(POLL_S, LOG_INTERVAL_FRACTION * measured.elapsed_s):
            self._written_at = now_s
            values = {"elapsed_s": measured.elapsed_s, "look": measured.judge.total()}
            self._write(rollout, "look", verdict.reasons, **values)
        if is_over:
            self._decide(rollout, verdict)

    def _server_info(self) -> ServerInfo:
        server_info = self._find_server()
        if server_info is None:
            raise NotReached("no server is running for this repository")
        return server_info

    def _decide(self, rollout: Rollout, verdict: StepVerdict) -> None:
        """Write a decision to the journal; its effect follows."""
        is_last = rollout.step + 1 == len(rollout.plan.steps)
        reasons = verdict.reasons
        if verdict.outcome == StepOutcome.INCONCLUSIVE and rollout.plan.if_inconclusive == "pause":
            is_written = self._write(rollout, "pause", (*reasons, *self._hints(rollout)))
        elif verdict.outcome == StepOutcome.PASS:
            is_written = self._write(rollout, "end" if is_last else "pass", reasons)
        else:
            is_written = self._write(rollout, "fail", reasons)
        hook = rollout.plan.hooks.after_decision
        if is_written and hook:
            # It must not delay a rollback.
            now = self.journals.latest() or rollout
            threading.Thread(target=self._notify, args=[hook, now], name="hook", daemon=True).start()

    def _notify(self, hook: str, rollout: Rollout) -> None:
        try:
            run_hook(hook, "after_decision", rollout)
        except OperationFailed as error:
            self._say(str(error))

    def _hints(self, rollout: Rollout) -> list[str]:
        if rollout.plan.steps[rollout.step] != SHADOW:
            return []
        limit = read_route_file(self._location).route().shadow_max_in_flight
        return [f"a shadow runs only while fewer than {limit} requests are in flight (shadow_max_in_flight)"]

    def _pause_for_edit(self, rollout: Rollout, current: RouteFileSnapshot) -> None:
        step = next((entry.parsed() for entry in current.entries if entry.sha256 == rollout.sha256), None)
        try:
            edits = differences(step, current.route()) if step else []
            edit = "; ".join(map(str, edits))
        except OperationFailed as error:
            self._say(str(error))
            edit = "its file is invalid, see the log"
        reason = f"the route was changed outside the rollout: {edit or 'see nereid route history'}"
        self._write(rollout, "pause", (reason,))

    def _write(self, rollout: Rollout, event: Event, reasons: tuple[str, ...] = (), **values: Any) -> bool:
        """Append an event, unless a command has changed the rollout in the meantime."""
        with self.journals.writing(rollout.number) as writer:
            now = writer.rollout
            if now is None or (now.phase, now.step) != (rollout.phase, rollout.step):
                return False
            writer.write(event, reasons, **values)
        if event != "wait":
            self._wait_reason = ""
        if event != "look":
            reason = f": {'; '.join(reasons)}" if reasons else ""
            self._say(f"{event}, step {rollout.step_name}{reason}")
        return True

    def _wait(self, rollout: Rollout, reason: str) -> None:
        """Note once why nothing can be done now."""
        if reason != self._wait_reason:
            self._wait_reason = reason
            with contextlib.suppress(OperationFailed, OSError):  # for example, a full disk
                self._write(rollout, "wait", (reason,))

    def _say(self, text: str) -> None:
        self._log(f"rollout {self._location.name} → {text}")

"""The controller of a route's rollout: it measures, judges, and changes the weights.

Every event is in the journal before its effect, and every effect can be repeated. So a controller that was
killed continues where it was. Only one controller of a route works at a time.
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
from nereid.backends.routing.assignment import Route, Shadow, Table, Variant, shares, with_default
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.base.serving_errors import InvalidConfig
from nereid.models.rollout.judge import Outcome, Verdict
from nereid.models.rollout.measurement import Measurement, read_page
from nereid.models.rollout.plan import SHADOW, Pair, RolloutPlan
from nereid.models.rollout.rollout_journal import BUSY, Event, Rollout, RolloutJournals
from nereid.models.routes.change import (
    SERVED,
    SERVED_S,
    Proposal,
    Propose,
    RunningServer,
    Superseded,
    change,
    change_with_retry,
    differences,
    plan,
    served_status,
)
from nereid.models.routes.target import RouteLocation, RouteState, present_table, read_state
from nereid.server.control import NotReached
from nereid.server.run_dir import ServerRecord

TIMEOUT_S = 60.0


def run_hook(hook: str, event: str, state: Rollout) -> None:
    """Run a hook and wait for its end; an empty one does nothing.

    Args:
        hook: a command, without a shell, that gets the JSON on stdin; or a URL that gets it as a POST.
        event: `before_step` or `after_decision`.
        state: of the rollout.

    Raises:
        OperationFailed: the hook failed, or did not end within a minute.
    """
    if not hook:
        return
    body = msgspec.json.encode({"event": event, "rollout": state})
    try:
        if hook.startswith("http://"):
            _post(hook, body)
        else:
            subprocess.run(shlex.split(hook), input=body, check=True, timeout=TIMEOUT_S, capture_output=True)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise OperationFailed(
            f"hook {event} '{hook}' ended with status {error.returncode}: {said[-1]}"
        ) from None
    except (OSError, ValueError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
        raise OperationFailed(f"hook {event} '{hook}' failed: {error}") from None


def _post(url: str, body: bytes) -> None:
    # The address is this machine's or its network's, so no proxy is used.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    opener.open(request, timeout=TIMEOUT_S).close()


class ControlGone(OperationFailed):
    """The route has no control any more, so there is nobody to get the candidate's traffic."""


def compared(table: Table, candidate: str, control: str = "") -> Pair:
    """Return the candidate and its control: the only other variant with traffic, or the given one.

    Raises:
        WrongUsage: the candidate does not exist, or not exactly one other variant has traffic.
    """
    variants = table.route.variants
    known = ", ".join(each.name for each in variants)
    if candidate not in (each.name for each in variants):
        raise WrongUsage(f"unknown candidate '{candidate}': expected a variant of the route, {known}")
    others = [
        each.name
        for each in variants
        if each.name != candidate and (each.name == control if control else each.weight)
    ]
    if len(others) != 1:
        raise WrongUsage(
            f"expected one variant with traffic as the control of '{candidate}', got "
            f"{', '.join(others) or 'none'}; fix: nereid route set, with weight 0 for the others"
        )
    shadow = f"rollout-{candidate}"[:64]
    if shadow in (each.name for each in variants):
        raise WrongUsage(f"expected no variant '{shadow}', the name of the rollout's shadow; fix: rename it")
    versions = table.network_versions
    return Pair((candidate, versions[candidate]), (others[0], versions[others[0]]), shadow)


def first_step(route: Route, plan: RolloutPlan) -> int:
    """Return the first step above the candidate's present share, so that no sticky key moves back.

    Raises:
        WrongUsage: the candidate has all traffic already.
    """
    present = shares(route)[plan.candidate] * 100
    for number, step in enumerate(plan.steps):
        if (step == SHADOW and not present) or (step != SHADOW and step > present + 1e-9):
            return number
    raise WrongUsage(f"'{plan.candidate}' has all traffic of the route already")


def at_step(state: Rollout) -> Propose:
    """Propose the present route with the weights and the shadow of a rollout's step."""
    share, plan = state.share, state.plan
    is_shadow = plan.steps[state.step] == SHADOW

    def propose(present: RouteState) -> Proposal:
        route = present.route()
        target = _variant(route, plan.candidate)
        shadow = Shadow(
            state.pair.shadow, target.model, target.version, plan.shadow_percent, target.deadline_ms
        )
        note = f"rollout of {plan.candidate}: {state.step_name}"
        return Proposal(_with(route, state.pair, share, (shadow,) if is_shadow else ()), note)

    return propose


def withdrawn(state: Rollout) -> Propose:
    """Propose the present route without traffic for the candidate."""

    def propose(present: RouteState) -> Proposal:
        note = f"rollout of {state.plan.candidate}: {state.result}"
        route, control = present.route(), state.pair.control[0]
        if control not in (each.name for each in route.variants):
            raise ControlGone(f"the route has no variant '{control}' any more, so its weights stay")
        route = _with(route, state.pair, 0.0, ())
        # The default must be ready, and replaces failing variants.
        default = control if route.default == state.plan.candidate else route.default
        return Proposal(with_default(route, default), note)

    return propose


def _variant(route: Route, name: str) -> Variant:
    found = [each for each in route.variants if each.name == name]
    if not found:
        raise WrongUsage(f"the route has no variant '{name}' any more")
    return found[0]


def _with(route: Route, pair: Pair, share: float, shadows: tuple[Shadow, ...]) -> Route:
    """Return a route with the share of the candidate, 0 to 1, and only these shadows of the rollout."""
    weights = {pair.candidate[0]: _weight(share), pair.control[0]: _weight(1 - share)}
    variants = tuple(replace(each, weight=weights.get(each.name, each.weight)) for each in route.variants)
    kept = tuple(each for each in route.shadows if each.name != pair.shadow)
    return replace(route, variants=variants, shadows=(*kept, *shadows))


def _weight(share: float) -> float:
    percent = round(share * 100, 6)
    return int(percent) if percent == int(percent) else percent


POLL_S = 1.0
# Looks without a decision are written at intervals of this part of the step's time.
LINE_PART = 0.01
FindServer = Callable[[], ServerRecord | None]


class _Edited(OperationFailed):
    """The route was changed outside the rollout."""


class _Overtaken(OperationFailed):
    """A command has changed the rollout."""


class Controller:
    """Carries out the rollouts of one route, one poll at a time.

    Args:
        location: the route.
        find_server: returns the server, or None if none runs.
        log: receives a line for each event.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        location: RouteLocation,
        find_server: FindServer,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._location, self._find_server, self._log, self._clock = location, find_server, log, clock
        self.journals = RolloutJournals.of(location)
        self._measurement: Measurement | None = None
        self._written_s = float("-inf")
        self._trouble = ""

    def step(self) -> bool:
        """Do what is due now; return whether the rollout is busy, so that the next poll is due soon.

        Raises:
            OperationFailed: a journal is damaged.
        """
        state = self.journals.active()
        if state is None or state.phase not in BUSY:
            self._measurement = None
            return False
        try:
            if state.phase == "measuring":
                self._poll(state)
                state = self.journals.active() or state
            elif state.phase == "stepping":
                self._begin(state)
            if state.phase == "withdrawing":
                self._withdraw(state)
        except (OperationFailed, InvalidConfig, OSError) as error:
            self._wait(state, str(error))
        return True

    def _begin(self, state: Rollout) -> None:
        """Bring the route to the state's step."""
        self._measurement = None
        server, present = RunningServer(self._record()), read_state(self._location)
        if not state.intended:
            if state.sha256 and present.sha256 != state.sha256:
                self._pause_for_edit(state, present)
                return
            if not self._announce(state, present):
                return
        propose = self._guarded(state, state.intended or present.sha256)
        try:
            planned = plan(self._location, propose)
            self._log(f"rollout {change(self._location, propose, server, wait_s=SERVED_S)}")
        except _Edited:
            self._pause_for_edit(state, read_state(self._location))
        except (_Overtaken, Superseded):
            pass  # the next poll has the new state
        except NotReached:
            raise
        except (OperationFailed, InvalidConfig) as error:
            self._refused(state, server, str(error))
        else:
            table = planned.table if planned.is_needed else planned.present
            self._write(state, "begin", sha256=table.sha256)

    def _announce(self, state: Rollout, present: RouteState) -> bool:
        """Write a change of the route to the journal, after its hook; return whether it may happen."""
        pair = compared(present_table(self._location, present), state.plan.candidate, state.pair.control[0])
        if pair != state.pair:
            expected, got = (
                f"version {each.candidate[1]} against {each.control[1]}" for each in (state.pair, pair)
            )
            self._write(state, "pause", (f"expected the variants of the start, {expected}, got {got}",))
            return False
        try:
            run_hook(state.plan.hooks.before_step, "before_step", state)
        except OperationFailed as error:
            self._say(str(error))
            self._write(state, "pause", ("the hook before_step failed, see the log",))
            return False
        return self._write(state, "change", sha256=present.sha256)

    def _guarded(self, state: Rollout, allowed: str) -> Propose:
        """Return a proposal for the route file `allowed`, or for one that has the step's weights already."""
        propose_step = at_step(state)

        def propose(present: RouteState) -> Proposal:
            now = self.journals.read(state.number)
            if now is None or (now.phase, now.step) != (state.phase, state.step):
                raise _Overtaken("a command has changed the rollout")
            proposal = propose_step(present)
            if present.sha256 != allowed and present.differs_from(proposal.route):
                raise _Edited("the route was changed outside the rollout")
            return proposal

        return propose

    def _refused(self, state: Rollout, server: RunningServer, reason: str) -> None:
        """Roll back if the candidate is not ready; another refusal is not the candidate's fault."""
        route = read_state(self._location).route()
        candidate = next((each for each in route.variants if each.name == state.plan.candidate), None)
        if candidate and server.is_ready(candidate.model, candidate.version):
            self._say(reason)
            self._write(state, "pause", ("the server does not serve the step, see the log",))
        else:
            self._decide(state, Verdict(Outcome.FAIL, (f"the candidate is not ready: {reason}",)))

    def _withdraw(self, state: Rollout) -> None:
        """Take all traffic from the candidate; without a server, the file is changed for its next start."""
        server, reasons = RunningServer.of(self._find_server()), state.reasons
        try:
            text = self._withdrawn(state, server)
        except ControlGone as error:
            text, reasons = f"{self._location.name}: {error}", (*reasons, str(error))
        else:
            status, _ = served_status(server, self._location.name, read_state(self._location).sha256)
            if server and status != SERVED:
                raise NotReached(f"the route without the candidate is {status}")
        self._log(f"rollout {text}")
        self._write(state, "end", reasons)

    def _withdrawn(self, state: Rollout, server: RunningServer | None) -> str:
        """Change the route file, even if the server does not respond; return a line about it."""
        try:
            return change_with_retry(self._location, withdrawn(state), server, SERVED_S)
        except NotReached:
            return change_with_retry(self._location, withdrawn(state), None)

    def _poll(self, state: Rollout) -> None:
        if sha256(route_file.read(self._location.path)[0]).hexdigest() != state.sha256:
            self._pause_for_edit(state, read_state(self._location))
            return
        page = read_page(self._record(), self._location.name)
        now_s = self._clock()
        if page.served.sha256s != {state.sha256}:
            self._measurement = None  # the counts belong to another route
            raise NotReached("the server does not use the route of this step yet")
        if self._measurement is None or not self._measurement.is_of(state):
            open_s = read_state(self._location).route().breaker.open_s
            self._measurement, self._written_s = Measurement(state, now_s, open_s), float("-inf")
        measured = self._measurement
        if not measured.add(page, now_s):
            return
        verdict = measured.verdict()
        is_over = verdict.outcome != Outcome.CONTINUE
        if is_over or now_s - self._written_s >= max(POLL_S, LINE_PART * measured.elapsed_s):
            self._written_s = now_s
            values = {"elapsed_s": measured.elapsed_s, "look": measured.total()}
            self._write(state, "look", verdict.reasons, **values)
        if is_over:
            self._decide(state, verdict)

    def _record(self) -> ServerRecord:
        record = self._find_server()
        if record is None:
            raise NotReached("no server runs for this repository")
        return record

    def _decide(self, state: Rollout, verdict: Verdict) -> None:
        """Write a decision to the journal; its effect follows."""
        is_last = state.step + 1 == len(state.plan.steps)
        reasons = verdict.reasons
        if verdict.outcome == Outcome.INCONCLUSIVE and state.plan.if_inconclusive == "pause":
            is_written = self._write(state, "pause", (*reasons, *self._hints(state)))
        elif verdict.outcome == Outcome.PASS:
            is_written = self._write(state, "end" if is_last else "pass", reasons)
        else:
            is_written = self._write(state, "fail", reasons)
        hook = state.plan.hooks.after_decision
        if is_written and hook:
            # It must not delay a rollback.
            now = self.journals.latest() or state
            threading.Thread(target=self._notify, args=[hook, now], name="hook", daemon=True).start()

    def _notify(self, hook: str, state: Rollout) -> None:
        try:
            run_hook(hook, "after_decision", state)
        except OperationFailed as error:
            self._say(str(error))

    def _hints(self, state: Rollout) -> list[str]:
        if state.plan.steps[state.step] != SHADOW:
            return []
        limit = read_state(self._location).route().shadow_max_in_flight
        return [f"a shadow runs only while fewer than {limit} requests are in flight (shadow_max_in_flight)"]

    def _pause_for_edit(self, state: Rollout, present: RouteState) -> None:
        step = next((entry.parsed() for entry in present.entries if entry.sha256 == state.sha256), None)
        try:
            found = differences(step, present.route()) if step else []
            edit = "; ".join(f"{each.path}: {each.old} → {each.new}" for each in found)
        except OperationFailed as error:
            self._say(str(error))
            edit = "its file is invalid, see the log"
        reason = f"the route was changed outside the rollout: {edit or 'see nereid route history'}"
        self._write(state, "pause", (reason,))

    def _write(self, state: Rollout, event: Event, reasons: tuple[str, ...] = (), **values: Any) -> bool:
        """Append an event, unless a command has changed the rollout in the meantime."""
        with self.journals.writing(state.number) as writer:
            now = writer.rollout
            if now is None or (now.phase, now.step) != (state.phase, state.step):
                return False
            writer.write(event, reasons, **values)
        if event != "wait":
            self._trouble = ""
        if event != "look":
            self._say(": ".join((f"{event}, step {state.step_name}", "; ".join(reasons))).removesuffix(": "))
        return True

    def _wait(self, state: Rollout, reason: str) -> None:
        """Note once why nothing can be done now."""
        if reason != self._trouble:
            self._trouble = reason
            with contextlib.suppress(OperationFailed, OSError):  # such as a full disk
                self._write(state, "wait", (reason,))

    def _say(self, text: str) -> None:
        self._log(f"rollout {self._location.name} → {text}")

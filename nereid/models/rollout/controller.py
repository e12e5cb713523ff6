"""The controller of a route's rollout: it measures, judges, and changes the weights.

Every event is in the journal before its effect, and every effect can be repeated. So a controller that was
killed continues where it was. Only one controller of a route works at a time.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from nereid.backends.routing import route_file
from nereid.base.errors import OperationFailed
from nereid.base.serving_errors import InvalidConfig
from nereid.models.rollout import hooks
from nereid.models.rollout.judge import Outcome, Verdict
from nereid.models.rollout.measurement import Measurement, read_page
from nereid.models.rollout.plan import SHADOW
from nereid.models.rollout.rollout_journal import BUSY, Event, Rollout, RolloutJournals
from nereid.models.rollout.route_steps import ControlGone, at_step, compared, withdrawn
from nereid.models.routes.change import (
    SERVED_S,
    Proposal,
    Propose,
    Superseded,
    change,
    change_with_retry,
    plan,
)
from nereid.models.routes.diff import differences
from nereid.models.routes.served import SERVED, RunningServer, served_status
from nereid.models.routes.target import RouteLocation, RouteState, present_table, read_state
from nereid.server.control import NotReached
from nereid.server.run_dir import ServerRecord

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
            hooks.run(state.plan.hooks.before_step, "before_step", state)
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
            hooks.run(hook, "after_decision", state)
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

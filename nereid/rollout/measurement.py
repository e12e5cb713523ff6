"""The measurement of one step: pages of the server's metrics go in, verdicts come out."""

import http.client
from dataclasses import dataclass

from nereid import metrics_page
from nereid.rollout import counts, judge
from nereid.rollout.counts import DISAGREEMENT, ERROR, SLOW, Counts
from nereid.rollout.judge import Objective, Objectives, Outcome, Verdict
from nereid.rollout.plan import BOUNDS, SHADOW
from nereid.rollout.rollout_journal import State
from nereid.routes.served import read_metrics
from nereid.server.control import NotReached
from nereid.server.run_dir import ServerRecord
from nereid.triton.metrics import ROUTE_PREFIX

PAGE_S = 5.0
# The route reports its counts every half second, so the first ones after a change belong to the old weights.
SETTLE_S = 1.5
# A breaker that is left open by an earlier failure closes in this time, if the candidate responds.
RECOVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Page:
    """The counts of a route on one server, the SHA-256 of the route files in use, and the open breakers."""

    pid: int
    counts: Counts
    sha256s: frozenset[str]
    open_breakers: frozenset[tuple[str, str]]


def read_page(record: ServerRecord, route: str) -> Page:
    """Read the metrics page of a server.

    Raises:
        NotReached: the page does not respond.
    """
    try:
        text = metrics_page.fetch(record.url("metrics"), PAGE_S)
    except (OSError, http.client.HTTPException) as error:
        raise NotReached(f"the server's metrics page does not respond: {error}") from None
    ours = "\n".join(line for line in text.splitlines() if line.startswith(ROUTE_PREFIX))
    served = read_metrics(ours, route)
    opened = frozenset(pair for pair, state in served.breakers.items() if state == "open")
    return Page(record.pid, counts.read(ours, route), served.sha256s, opened)


class Measurement:
    """The running measurement of a step.

    Args:
        state: of the rollout, with the counts of an earlier controller, if there was one.
        now_s: time of a monotonic clock.
    """

    def __init__(self, state: State, now_s: float) -> None:
        self.state, self.elapsed_s = state, state.elapsed_s
        self._began_s = self._last_s = now_s
        self._judged = judge.Step(objectives(state), state.share, BOUNDS)
        if state.look:
            self._judged.add(state.look)
        self._page: Page | None = None
        # An open breaker may be left from an earlier failure.
        self._was_closed = False

    def is_of(self, state: State) -> bool:
        """Return whether this measures the present step of a rollout."""
        mine = self.state
        return (mine.number, mine.step, mine.sha256) == (state.number, state.step, state.sha256)

    def add(self, page: Page, now_s: float) -> bool:
        """Add a page; return whether it counts: the first ones after a change belong to the old weights.

        Raises:
            NotReached: the server has restarted since the page before.
        """
        before, self._page = self._page, page
        passed_s, self._last_s = now_s - self._last_s, now_s
        if before is None or now_s - self._began_s < SETTLE_S:
            return False
        if page.pid != before.pid or not page.counts.is_continuation_of(before.counts):
            raise NotReached("the server has restarted, and its counters were reset")
        self._was_closed |= self.state.pair.candidate not in page.open_breakers
        # A machine that slept measured nothing in the meantime.
        self.elapsed_s += min(passed_s, PAGE_S)
        self._judged.add(counts.growth(before.counts, page.counts, self.state.pair, self.state.slow_s))
        return True

    def total(self) -> judge.Look:
        """Return all counts of the step."""
        return self._judged.total()

    def verdict(self) -> Verdict:
        """Judge the counts of the step, its duration and the breakers."""
        plan, pair = self.state.plan, self.state.pair
        is_seen = self._was_closed or self.elapsed_s >= max(plan.hold_s, RECOVERY_S)
        opened = self._page.open_breakers if self._page and is_seen else frozenset()
        if pair.candidate in opened and pair.control in opened:
            reason = f"the breakers of '{pair.candidate[0]}' and '{pair.control[0]}' are open: no comparison"
            return Verdict(Outcome.INCONCLUSIVE, (reason,))
        if pair.candidate in opened:
            if not self._was_closed:
                reason = f"the breaker of '{pair.candidate[0]}' was open during the whole step"
                return Verdict(Outcome.FAIL, (reason,))
            total = self.total().events.get(ERROR)
            seen = f", {total[0].events:,} of {total[0].requests:,} requests failed" if total else ""
            return Verdict(Outcome.FAIL, (f"the breaker of '{pair.candidate[0]}' has opened{seen}",))
        verdict = self._judged.verdict(self.elapsed_s >= plan.hold_s)
        if verdict.outcome == Outcome.CONTINUE and self.elapsed_s >= plan.patience_s:
            reason = f"no decision within {plan.patience_s:g} s"
            return Verdict(Outcome.INCONCLUSIVE, (reason, *verdict.reasons))
        return verdict


def objectives(state: State) -> Objectives:
    """Return the limits that the candidate must keep in a step."""
    plan = state.plan
    if plan.steps[state.step] == SHADOW:
        events: tuple[Objective, ...] = (Objective(DISAGREEMENT, plan.max_disagreement),)
    else:
        slow = Objective(
            SLOW, plan.max_slow_ratio, plan.max_slow_increase, plan.max_slow_increase / 2, is_in_phases=True
        )
        events = Objective(ERROR, plan.max_error_ratio, plan.max_error_increase), slow
    return Objectives(
        events,
        max_latency_ratio=1 + plan.max_latency_increase,
        risk=state.risk,
        miss_risk=1 - plan.power,
        min_requests=plan.min_requests,
    )

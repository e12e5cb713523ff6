"""The measurement of a step, which turns pages of the server's metrics into verdicts."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from nereid.backends.triton.metrics import ROUTE_PREFIX
from nereid.base.prometheus_text import BUCKET, MetricSamples
from nereid.models.rollout import judge
from nereid.models.rollout.judge import (
    EventCount,
    EventLimit,
    PairCounts,
    StepLimits,
    StepOutcome,
    StepVerdict,
)
from nereid.models.rollout.plan import BOUNDS, SHADOW, Pair
from nereid.models.rollout.rollout_journal import Rollout
from nereid.models.routes.change import ServedRouteStatus, read_samples, read_served_status
from nereid.server.model_control import NotReached
from nereid.server.run_dir import ServerInfo

# Outcomes that are the fault of a variant. The others are the fault of the caller or of the load.
VARIANT_FAULTS = frozenset({"inference_failed", "deadline_exceeded", "unavailable", "error"})
# Reasons for a variant that the route chooses itself. Callers that name a variant are not a random sample,
# and the requests of one key all go to one variant.
BY_WEIGHT, BY_ROUTE_KEY = "weight", "route-key"
ERROR, SLOW, DISAGREEMENT = "error", "slow", "disagreement"
REQUESTS, SHADOWS = f"{ROUTE_PREFIX}requests_total", f"{ROUTE_PREFIX}shadow_requests_total"
DURATIONS = f"{ROUTE_PREFIX}request_duration_seconds"
COUNTERS = (REQUESTS, SHADOWS, DURATIONS + BUCKET)
MAX_COUNTED_GAP_S = 5.0
# The route reports its counts every half second, so the first ones after a change belong to the old weights.
SETTLING_S = 1.5
# A breaker left open by an earlier failure has time for this many trials to close, and enough traffic for
# chance to give its variant this many requests.
MIN_TRIALS, TRIAL_REQUESTS = 5, 20


def count_pair(
    increase: MetricSamples, pair: Pair, slow_s: float, carried_slow: list[int] | None = None
) -> PairCounts:
    """Return the counts of a rollout.

    Args:
        slow_s: a bucket's upper bound; slower requests count as `slow`.
        carried_slow: negative counts of slow requests of candidate and control, from buckets that lagged
            behind; the next ones are set off against them, and the rest is stored here.
    """
    candidate, control = (_counts(increase, variant, slow_s) for variant in (pair.candidate, pair.control))
    carried_slow = [0, 0] if carried_slow is None else carried_slow
    carried_slow[:] = carried_slow[0] + candidate.slow, carried_slow[1] + control.slow
    slows = [
        EventCount(counts.answered, min(max(0, slow), counts.answered))
        for counts, slow in zip((candidate, control), carried_slow, strict=True)
    ]
    carried_slow[:] = [min(0, slow) for slow in carried_slow]
    labels = {"shadow": pair.shadow}
    agreed = int(increase.total(SHADOWS, labels | {"outcome": "agreed"}))
    disagreed = int(increase.total(SHADOWS, {**labels, "outcome": ("disagreed", "failed")}))
    return PairCounts(
        {
            ERROR: (candidate.errors, control.errors),
            SLOW: (slows[0], slows[1]),
            DISAGREEMENT: (EventCount(agreed + disagreed, disagreed), EventCount(0, 0)),
        },
        (candidate.latencies, control.latencies),
        (candidate.drawn, control.drawn),
    )


class _Counts(NamedTuple):
    """The counts of one variant; `slow` and `latencies` may be negative if buckets lag behind."""

    errors: EventCount
    answered: int
    slow: int
    latencies: list[int]
    drawn: int


def _counts(increase: MetricSamples, variant: tuple[str, str], slow_s: float) -> _Counts:
    """Count the requests of a variant, but not from callers that named it or another variant."""
    labels = dict(zip(("variant", "version"), variant, strict=True))
    chosen = {**labels, "reason": (BY_WEIGHT, BY_ROUTE_KEY)}
    # Older servers send no label `chosen`.
    histograms = increase.buckets(DURATIONS, labels=labels | {"outcome": "ok"}, excluding={"chosen": "false"})
    buckets = {bound: int(histograms.get((), {}).get(bound, 0)) for bound in (*BOUNDS, math.inf)}
    answered = max(0, sum(buckets.values()))
    slow = sum(count for bound, count in buckets.items() if bound > slow_s)
    return _Counts(
        EventCount(
            int(increase.total(REQUESTS, chosen)),
            int(increase.total(REQUESTS, {**chosen, "outcome": VARIANT_FAULTS})),
        ),
        answered,
        slow,
        list(buckets.values()),
        int(increase.total(REQUESTS, labels | {"reason": BY_WEIGHT})),
    )


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The metrics of a route on one server, and the route files and breakers in use."""

    pid: int
    samples: MetricSamples
    served: ServedRouteStatus

    @classmethod
    def read(cls, server_info: ServerInfo, route: str) -> "MetricsSnapshot":
        """Read a server's metrics page; raises `NotReached` if it does not respond."""
        samples = read_samples(server_info, route)
        return cls(server_info.pid, samples, read_served_status(samples, route))


class Measurement:
    """The running measurement of a step; `judge` contains its counts.

    Args:
        rollout: with the counts of an earlier controller, if there was one.
        open_s: seconds until an open breaker of the route lets a trial through.
    """

    def __init__(self, rollout: Rollout, now_s: float, open_s: float) -> None:
        self.rollout, self.elapsed_s, self._open_s = rollout, rollout.elapsed_s, open_s
        self._started_at = self._added_at = now_s
        self.judge = judge.StepJudge(step_limits(rollout), rollout.share, BOUNDS)
        if rollout.look:
            self.judge.add(rollout.look)
        self._snapshot: MetricsSnapshot | None = None
        self._carried_slow = [0, 0]
        # An open breaker may be left from an earlier failure.
        self._was_closed = False

    def is_of(self, rollout: Rollout) -> bool:
        """Return whether this measures the current step of a rollout."""
        measured = self.rollout
        return (measured.number, measured.step, measured.sha256) == (
            rollout.number,
            rollout.step,
            rollout.sha256,
        )

    def add(self, snapshot: MetricsSnapshot, now_s: float) -> bool:
        """Add a snapshot; return whether it counts: the first ones after a change belong to the old weights.

        Raises:
            NotReached: the server has restarted since the previous snapshot.
        """
        before, self._snapshot = self._snapshot, snapshot
        passed_s, self._added_at = now_s - self._added_at, now_s
        if before is None or now_s - self._started_at < SETTLING_S:
            return False
        if snapshot.pid != before.pid or snapshot.samples.was_reset(before.samples, COUNTERS):
            raise NotReached("the server has restarted, and its counters were reset")
        # Without requests to a variant, the page does not show its breaker.
        self._was_closed |= snapshot.served.breakers.get(self.rollout.pair.candidate, "closed") == "closed"
        # A machine that slept measured nothing in the meantime.
        self.elapsed_s += min(passed_s, MAX_COUNTED_GAP_S)
        increase, rollout = snapshot.samples - before.samples, self.rollout
        self.judge.add(count_pair(increase, rollout.pair, rollout.slow_s, self._carried_slow))
        return True

    def verdict(self) -> StepVerdict:
        """Judge the counts of the step, its duration and the breakers."""
        plan, pair = self.rollout.plan, self.rollout.pair
        breakers = self._snapshot.served.breakers if self._snapshot else {}
        is_open, is_control_open = (
            breakers.get(variant) == "open" for variant in (pair.candidate, pair.control)
        )
        name = pair.candidate[0]
        if is_open and (self._was_closed or self._has_had_trials()):
            if is_control_open:
                reason = f"the breakers of '{name}' and '{pair.control[0]}' are open: no comparison"
                return StepVerdict(StepOutcome.INCONCLUSIVE, (reason,))
            if not self._was_closed:
                waited_s = self._added_at - self._started_at
                return StepVerdict(
                    StepOutcome.FAIL, (f"the breaker of '{name}' has not closed in {waited_s:.0f} s",)
                )
            total = self.judge.total().events.get(ERROR)
            failures = f", {total[0].events:,} of {total[0].requests:,} requests failed" if total else ""
            return StepVerdict(StepOutcome.FAIL, (f"the breaker of '{name}' has opened{failures}",))
        verdict = self.judge.verdict(self.elapsed_s >= plan.hold_s)
        if verdict.outcome == StepOutcome.CONTINUE and self.elapsed_s >= plan.patience_s:
            reason = f"no decision within {plan.patience_s:g} s"
            return StepVerdict(StepOutcome.INCONCLUSIVE, (reason, *verdict.reasons))
        return verdict

    def _has_had_trials(self) -> bool:
        """Return whether the candidate's breaker had the time and the requests to close.

        While it is open, requests of the candidate are not counted, so the control's are used instead.
        In the last step, without a control, only the time counts. Copies for a shadow bypass the breaker.
        """
        measured_s, share = self._added_at - self._started_at, self.rollout.share
        if not share or measured_s < max(self.rollout.plan.hold_s, MIN_TRIALS * self._open_s):
            return False
        _, drawn_of_control = self.judge.total().drawn
        return share == 1 or drawn_of_control * share / (1 - share) >= TRIAL_REQUESTS


def step_limits(rollout: Rollout) -> StepLimits:
    """Return the limits that the candidate must keep in a step."""
    plan = rollout.plan
    if plan.steps[rollout.step] == SHADOW:
        events: tuple[EventLimit, ...] = (EventLimit(DISAGREEMENT, plan.max_disagreement),)
    else:
        slow = EventLimit(
            SLOW, plan.max_slow_ratio, plan.max_slow_increase, plan.max_slow_increase / 2, is_in_blocks=True
        )
        events = EventLimit(ERROR, plan.max_error_ratio, plan.max_error_increase), slow
    return StepLimits(
        events,
        max_latency_ratio=1 + plan.max_latency_increase,
        risk=rollout.risk,
        miss_risk=1 - plan.power,
        min_requests=plan.min_requests,
    )

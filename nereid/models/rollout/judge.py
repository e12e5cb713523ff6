"""The judge of a step: counts of candidate and control go in, a verdict with its reasons comes out.

It has no clock, no network and no state besides the counts of its step, so a simulation can run it 10,000
times. Three layers, from fast to slow:

1. Guards: the candidate alone is over a limit, tested at every look.
2. Comparison: the candidate is worse than the concurrent control, or it is not, tested at every look.
3. Gates: at the end of a step, the latencies as a whole, and whether the traffic is split as configured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

from nereid.base.metrics_page import quantile
from nereid.models.rollout.evidence import NONE, Evidence, Tally, chance_of_slower, chance_of_split

# A split that is this improbable is broken; its cause makes all comparisons worthless. With a larger risk,
# chance alone would pause good rollouts; a wrong weight is soon far less probable than this.
SPLIT_RISK = 1e-6
# Larger forecasts are cut off.
MAX_NEEDED, MAX_LOOKS = 1e9, 100_000


class Outcome(StrEnum):
    """The result of a look at the counts."""

    CONTINUE = "continue"
    PASS = "pass"  # not a password
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome, and the numbers that decided, in words."""

    outcome: Outcome
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Objective:
    """A limit for one kind of event.

    `limit` bounds the candidate's rate by itself, `increase` its difference from the control's rate. Without
    `increase` the event has no control, such as a disagreement of a shadow with the response. A difference
    below `tolerated` is never a reason to roll back, however many requests show it. With `is_in_phases`, the
    events of one look are not independent, such as slow requests.
    """

    event: str
    limit: float
    increase: float | None = None
    tolerated: float = 0.0
    is_in_phases: bool = False


@dataclass(frozen=True, slots=True)
class Objectives:
    """The limits that a candidate must keep.

    `risk` is the probability that a step rolls back a candidate that is as good as its control; `miss_risk`
    is the probability that it passes one that is worse by an objective's `increase`.
    """

    events: tuple[Objective, ...]
    max_latency_ratio: float
    risk: float
    miss_risk: float
    min_requests: int


@dataclass(frozen=True, slots=True)
class Look:
    """The counts since the last look.

    `events` has the tallies of candidate and control by event; `latencies` has the requests per bucket;
    `drawn` has the requests that each of both got by weight.
    """

    events: Mapping[str, tuple[Tally, Tally]]
    latencies: tuple[Sequence[int], Sequence[int]]
    drawn: tuple[int, int]


@dataclass(slots=True)
class Sums:
    """All counts of a step for one event, and the evidence from them."""

    objective: Objective
    over: Evidence | None
    worse: Evidence | None
    not_worse: Evidence
    candidate: Tally = NONE
    control: Tally = NONE

    def add(self, candidate: Tally, control: Tally) -> None:
        """Add the counts of a look."""
        compared = None if self.objective.increase is None else control
        if self.over:
            self.over.add(candidate, None)
        if self.worse:
            self.worse.add(candidate, control)
        self.not_worse.add(candidate, compared)
        self.candidate += candidate
        self.control += control

    @property
    def tests(self) -> int:
        """The number of tests that can fail the candidate."""
        return (self.over is not None) + (self.worse is not None)

    def failures(self, risk: float) -> list[str]:
        """Return why the candidate fails; `risk` is that of each test."""
        found = []
        if self.over and self.over.is_enough(risk):
            found.append(f"{self}: over the limit of {self.objective.limit:.2%}")
        if self.worse and self.worse.is_enough(risk):
            found.append(f"{self}: worse than the control")
        return found

    def needed(self, share: float, risk: float) -> str:
        """Return in words about how many requests the decision needs at the control's present rate."""
        if self.objective.increase is None:
            return ""
        if self.objective.is_in_phases:
            return f", about {looks_needed(self.objective, risk):,} looks needed"
        total = requests_needed(self.objective, share, round(self.control.rate, 3), risk)
        return f", about {math.ceil(total * share):,} needed"

    def __str__(self) -> str:
        if not self.candidate.requests:
            return f"{self.objective.event}: no requests"
        text = f"{self.objective.event} {_percent(self.candidate)} of {self.candidate.requests:,}"
        if self.control.requests:
            text += f" against {_percent(self.control)} of {self.control.requests:,}"
        return text


@dataclass(slots=True)
class Step:
    """The judgement of one step of a rollout.

    Args:
        objectives: the limits.
        share: the candidate's configured part of the traffic, 0 to 1. With 1, only the limits of the
            candidate alone are checked.
        bounds: upper bounds of the latency buckets in seconds, without the last.
    """

    objectives: Objectives
    share: float
    bounds: Sequence[float]
    _sums: list[Sums] = field(init=False)
    _latencies: tuple[list[int], list[int]] = field(init=False)
    _drawn: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._sums = [_begin(each) for each in self.objectives.events]
        size = len(self.bounds) + 1
        self._latencies, self._drawn = ([0] * size, [0] * size), [0, 0]

    def add(self, look: Look) -> None:
        """Add the counts of a look."""
        for sums in self._sums:
            sums.add(*look.events[sums.objective.event])
        for total, new in zip((*self._latencies, self._drawn), (*look.latencies, look.drawn), strict=True):
            total[:] = [old + count for old, count in zip(total, new, strict=True)]

    def total(self) -> Look:
        """Return all counts so far as one look."""
        events = {each.objective.event: (each.candidate, each.control) for each in self._sums}
        ours, theirs = self._latencies
        return Look(events, (tuple(ours), tuple(theirs)), (self._drawn[0], self._drawn[1]))

    def verdict(self, is_over: bool) -> Verdict:
        """Judge all counts so far; with `is_over`, the step has had its time."""
        failed = [reason for sums in self._sums for reason in sums.failures(self._risk())]
        if failed:
            return Verdict(Outcome.FAIL, tuple(failed))
        waits = self._waits()
        if not waits and is_over:
            return self._gate()
        return Verdict(Outcome.CONTINUE, tuple(waits) or ("the minimum duration is not over",))

    def _risk(self) -> float:
        """Return the part of the risk that each test has; the test of the latencies is one more."""
        return self.objectives.risk / (1 + sum(sums.tests for sums in self._sums))

    def _waits(self) -> list[str]:
        few = min((each.candidate.requests for each in self._sums), default=0)
        if few < self.objectives.min_requests:
            return [f"{few:,} of at least {self.objectives.min_requests:,} requests of the candidate"]
        if self.share == 1:
            return []
        missed = self.objectives.miss_risk
        return [
            f"{sums}{sums.needed(self.share, missed)}, no decision yet"
            for sums in self._sums
            if not sums.not_worse.is_enough(missed)
        ]

    def _gate(self) -> Verdict:
        drawn, total = self._drawn[0], sum(self._drawn)
        if chance_of_split(drawn, total, self.share) < SPLIT_RISK:
            got = f"{drawn / total:.1%}"
            reason = f"broken split: expected {self.share:.1%} of the requests at the candidate, got {got}"
            return Verdict(Outcome.INCONCLUSIVE, (reason,))
        ours, theirs = (median(self.bounds, counts) for counts in self._latencies)
        ratio = ours / theirs
        if ratio > self.objectives.max_latency_ratio and chance_of_slower(*self._latencies) < self._risk():
            return Verdict(Outcome.FAIL, (f"the median latency is {ratio:.2f} times the control's",))
        return Verdict(Outcome.PASS, tuple(str(sums) for sums in self._sums))


def median(bounds: Sequence[float], counts: Sequence[int]) -> float:
    """Return the median of latencies from the requests per bucket; `nan` without any."""
    return quantile(0.5, dict(zip((*bounds, math.inf), counts, strict=True)))


def _begin(objective: Objective) -> Sums:
    over = Evidence(objective.limit, against_smaller=True) if objective.limit < 1 else None
    if objective.increase is None:
        return Sums(objective, over, None, Evidence(objective.limit, against_smaller=False))
    in_blocks = objective.is_in_phases
    worse = Evidence(objective.tolerated, against_smaller=True, in_blocks=in_blocks)
    not_worse = Evidence(objective.increase, against_smaller=False, in_blocks=in_blocks)
    return Sums(objective, over, worse, not_worse)


def _percent(tally: Tally) -> str:
    return f"{tally.rate:.2%}" if tally.requests else "none"


@cache
def requests_needed(objective: Objective, share: float, rate: float, risk: float) -> int:
    """Return about how many requests, both together, show that an equal candidate is not worse.

    Args:
        objective: with an `increase`.
        share: the candidate's part of the traffic.
        rate: the expected rate of both.
        risk: of this test.
    """
    increase = objective.increase or objective.limit
    low, high = 1.0, 1.0
    while high < MAX_NEEDED and not _shows(high, share, rate, risk, increase):
        low, high = high, 2 * high
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _shows(middle, share, rate, risk, increase) else (middle, high)
    return math.ceil(high)


@cache
def looks_needed(objective: Objective, risk: float) -> int:
    """Return how many looks show that an equal candidate is not worse, for events in phases."""
    evidence = Evidence(objective.increase or objective.limit, against_smaller=False, in_blocks=True)
    for count in range(1, MAX_LOOKS):
        evidence.add(Tally(1, 0), Tally(1, 0))
        if evidence.is_enough(risk):
            return count
    return MAX_LOOKS


def _shows(total: float, share: float, rate: float, risk: float, increase: float) -> bool:
    evidence = Evidence(increase, against_smaller=False)
    candidate = max(1, round(total * share))
    control = max(0, round(total * (1 - share)))
    evidence.add(Tally(candidate, round(candidate * rate)), Tally(control, round(control * rate)))
    return evidence.is_enough(risk)

"""The judge of a step, which turns the counts of candidate and control into a verdict with its reasons.

It has no clock, no network and no state beyond the counts of its step, so a simulation can run it 10,000
times. Three layers, from fast to slow:

1. Guards: the candidate alone is over a limit, tested at every poll.
2. Comparison: the candidate is worse than the concurrent control, or it is not, tested at every poll.
3. Gates: at the end of a step, the whole latency distribution, and whether traffic is split as configured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from nereid.base.prometheus_text import quantile, without_lag

# Fractions of the largest bet that cannot lose more than the capital. The capital is divided among them so
# that some of them suit the true rates.
SHARES = tuple(0.9 * 0.5**power for power in range(10))
# A split this improbable is broken, and its cause makes all comparisons worthless. With a larger risk,
# chance alone would pause good rollouts; a wrong weight is soon far less probable than this.
SPLIT_RISK = 1e-6
# Larger forecasts are cut off.
MAX_NEEDED, MAX_POLLS = 1e9, 100_000


@dataclass(frozen=True, slots=True)
class EventCount:
    """Requests, and how many of them had an event such as an error."""

    requests: int
    events: int

    def __post_init__(self) -> None:
        if not 0 <= self.events <= self.requests:
            raise ValueError(f"expected 0 ≤ events ≤ requests, got {self.events} of {self.requests}")

    @property
    def rate(self) -> float:
        """The fraction of requests with an event; 0 without requests."""
        return self.events / self.requests if self.requests else 0.0

    def __add__(self, other: "EventCount") -> "EventCount":
        return EventCount(self.requests + other.requests, self.events + other.events)


NO_REQUESTS = EventCount(0, 0)


class BettingTest:
    """Capital of bets against one hypothesis about the rates of a candidate and its control.

    With `is_in_blocks`, each block, that is, each call of `add`, is one bet on the difference of the rates.
    If a variant is slow for some seconds, all its requests in these seconds are slow. Requests are then not
    independent, so only the blocks count, not the number of requests in them.

    Args:
        margin: the difference of the rates at the edge of the hypothesis, candidate minus control.
        against_smaller: whether the hypothesis is that the difference is at most `margin`, so that a worse
            candidate makes the capital grow; otherwise, that it is at least `margin`.
        is_in_blocks: whether the requests of one call depend on each other.
    """

    def __init__(self, margin: float, against_smaller: bool, is_in_blocks: bool = False) -> None:
        if not -1 < margin < 1:
            raise ValueError(f"expected a margin between -1 and 1, got {margin}")
        self._margin, self._sign, self._is_in_blocks = margin, 1 if against_smaller else -1, is_in_blocks
        self._log_capitals = [0.0] * len(SHARES)

    def add(self, candidate: EventCount, control: EventCount | None) -> None:
        """Bet on the counts since the last call.

        Without a control (None), the hypothesis is about the candidate's rate alone. Counts in which one of
        both has no requests compare nothing, and are left out.
        """
        if not candidate.requests or (control and not control.requests):
            return
        control = control or NO_REQUESTS
        largest = self._largest_bet(candidate.requests / (candidate.requests + control.requests))
        self._log_capitals = [
            log + self._log_return(self._sign * share * largest, candidate, control)
            for log, share in zip(self._log_capitals, SHARES, strict=True)
        ]

    @property
    def log_capital(self) -> float:
        """Natural logarithm of the capital, which starts at 1."""
        top = max(self._log_capitals)
        return top + math.log(
            sum(math.exp(log - top) for log in self._log_capitals) / len(self._log_capitals)
        )

    def rejects(self, risk: float) -> bool:
        """Return whether the hypothesis is rejected; `risk` is the probability of a wrong rejection."""
        return self.log_capital >= -math.log(risk)

    def _largest_bet(self, share: float) -> float:
        """Return the largest bet with a capital that stays positive; `share` is the candidate's."""
        if self._is_in_blocks:  # a difference is at least -1 and at most 1
            return 1 / (1 + self._sign * self._margin)
        worst_event = 1 / share - self._margin
        worst_control = self._margin + (1 / (1 - share) if share < 1 else 0.0)
        # The smallest value of the weighted event minus the margin, in the direction of the bet.
        loss = max(worst_control, self._margin) if self._sign > 0 else max(worst_event, -self._margin)
        return 1 / loss if loss > 0 else 1.0

    def _log_return(self, bet: float, candidate: EventCount, control: EventCount) -> float:
        """Return the logarithm of what one unit of capital becomes with a bet.

        Each request of the candidate brings `1 + bet * (event / s - margin)`, each request of the control
        `1 + bet * (-event / (1 - s) - margin)`, with s the candidate's share of these requests. The
        expectation of the product is x^(s n) y^((1-s) n) with x and y the two means; by the inequality of the
        arithmetic and the geometric mean it is at most (1 + bet * (difference of the rates - margin))^n. So
        it is at most 1 if the hypothesis is true, whatever the rate of the control is.
        """
        if self._is_in_blocks:
            return math.log1p(bet * (candidate.rate - control.rate - self._margin))
        total = candidate.requests + control.requests
        share, base = candidate.requests / total, 1 - bet * self._margin
        pairs: Sequence[tuple[int, float]] = (
            (candidate.events, base + bet / share),
            (control.events, base - bet / (1 - share) if share < 1 else base),
            (total - candidate.events - control.events, base),
        )
        return sum(count * math.log(factor) for count, factor in pairs if count)


def slower_p_value(candidate: Sequence[int], control: Sequence[int]) -> float:
    """Return the probability that the candidate looks at least this much slower if both are equal.

    This is the p-value of the one-sided rank test of Mann and Whitney, with the normal approximation and the
    correction for ties, because all requests of a bucket are ties. Without requests it is 1.

    Source: Lehmann, Nonparametrics (2006), 1.2 and 1.4.
    """
    candidate_count, control_count = sum(candidate), sum(control)
    total = candidate_count + control_count
    if not candidate_count or not control_count:
        return 1.0
    below, wins, pair_count = 0, 0.0, candidate_count * control_count
    for in_candidate, in_control in zip(candidate, control, strict=True):
        wins += in_candidate * (below + in_control / 2)
        below += in_control
    bucket_sizes = [sum(counts) for counts in zip(candidate, control, strict=True)]
    ties = sum(size**3 - size for size in bucket_sizes)
    variance = pair_count / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:  # all requests are in one bucket
        return 1.0
    return _upper_tail((wins - pair_count / 2 - 0.5) / math.sqrt(variance))


def split_p_value(requests: int, total: int, share: float) -> float:
    """Return the probability of a split at least this far from its share, if requests follow it.

    This is the p-value of the chi-square test with one degree of freedom.
    """
    if not total or not 0 < share < 1:
        return 1.0
    score = abs(requests - share * total) / math.sqrt(total * share * (1 - share))
    return 2 * _upper_tail(score)


def _upper_tail(score: float) -> float:
    return math.erfc(score / math.sqrt(2)) / 2


class StepOutcome(StrEnum):
    """The outcome of the counts."""

    CONTINUE = "continue"
    PASS = "pass"  # not a password
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """An outcome, and the numbers that decided, in words."""

    outcome: StepOutcome
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EventLimit:
    """A limit for one kind of event.

    `max_rate` bounds the candidate's rate by itself, `increase` its difference from the control's rate.
    Without `increase` the event has no control, such as a disagreement of a shadow with the response. A
    difference below `tolerated` is never a reason to roll back, however many requests show it. With
    `is_in_blocks`, the events of one poll are not independent, for example slow requests.
    """

    event: str
    max_rate: float
    increase: float | None = None
    tolerated: float = 0.0
    is_in_blocks: bool = False


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits that a candidate must keep.

    `risk` is the probability that a step rolls back a candidate that is as good as its control; `miss_risk`
    is the probability that it passes one that is worse by a limit's `increase`.
    """

    events: tuple[EventLimit, ...]
    max_latency_ratio: float
    risk: float
    miss_risk: float
    min_requests: int


@dataclass(frozen=True, slots=True)
class PairCounts:
    """The counts since the last poll.

    `events` holds the counts of candidate and control by event, `latencies` the requests per bucket, and
    `drawn` the requests that each got by weight.
    """

    events: Mapping[str, tuple[EventCount, EventCount]]
    latencies: tuple[Sequence[int], Sequence[int]]
    drawn: tuple[int, int]


class EventTests:
    """All counts of a step for one event, and the evidence from them."""

    def __init__(self, limit: EventLimit) -> None:
        self.limit, self.candidate, self.control = limit, NO_REQUESTS, NO_REQUESTS
        self.exceeds_limit = BettingTest(limit.max_rate, against_smaller=True) if limit.max_rate < 1 else None
        self.inferiority: BettingTest | None = None
        margin, is_in_blocks = limit.max_rate, limit.is_in_blocks
        if limit.increase is not None:
            margin = limit.increase
            self.inferiority = BettingTest(limit.tolerated, against_smaller=True, is_in_blocks=is_in_blocks)
        self.non_inferiority = BettingTest(margin, against_smaller=False, is_in_blocks=is_in_blocks)

    def add(self, candidate: EventCount, control: EventCount) -> None:
        """Add the counts of a poll."""
        compared = None if self.limit.increase is None else control
        if self.exceeds_limit:
            self.exceeds_limit.add(candidate, None)
        if self.inferiority:
            self.inferiority.add(candidate, control)
        self.non_inferiority.add(candidate, compared)
        self.candidate += candidate
        self.control += control

    @property
    def test_count(self) -> int:
        """The number of tests that can fail the candidate."""
        return (self.exceeds_limit is not None) + (self.inferiority is not None)

    def failures(self, risk: float) -> list[str]:
        """Return why the candidate fails; `risk` is each test's."""
        reasons = []
        if self.exceeds_limit and self.exceeds_limit.rejects(risk):
            reasons.append(f"{self}: over the limit of {self.limit.max_rate:.2%}")
        if self.inferiority and self.inferiority.rejects(risk):
            reasons.append(f"{self}: worse than the control")
        return reasons

    def needed(self, share: float, risk: float) -> str:
        """Describe roughly how many requests the decision needs at the control's current rate."""
        if self.limit.increase is None:
            return ""
        if self.limit.is_in_blocks:
            return f", about {polls_needed(self.limit, risk):,} polls needed"
        total = requests_needed(self.limit, share, round(self.control.rate, 3), risk)
        return f", about {math.ceil(total * share):,} needed"

    def __str__(self) -> str:
        if not self.candidate.requests:
            return f"{self.limit.event}: no requests"
        text = f"{self.limit.event} {_percent(self.candidate)} of {self.candidate.requests:,}"
        if self.control.requests:
            text += f" against {_percent(self.control)} of {self.control.requests:,}"
        return text


class StepJudge:
    """The judgement of one step of a rollout.

    Args:
        share: the candidate's configured fraction of the traffic, 0 to 1. With 1, only the limits of the
            candidate alone are checked.
        bounds: upper bounds of the latency buckets in seconds, without the last.
    """

    def __init__(self, limits: StepLimits, share: float, bounds: Sequence[float]) -> None:
        self.limits, self.share, self.bounds = limits, share, bounds
        self._tests = [EventTests(limit) for limit in limits.events]
        size = len(bounds) + 1
        self._latencies, self._drawn = ([0] * size, [0] * size), [0, 0]

    def add(self, counts: PairCounts) -> None:
        """Add the counts of a poll."""
        for tests in self._tests:
            tests.add(*counts.events[tests.limit.event])
        for total, new in zip(
            (*self._latencies, self._drawn), (*counts.latencies, counts.drawn), strict=True
        ):
            total[:] = [old + count for old, count in zip(total, new, strict=True)]

    def total(self) -> PairCounts:
        """Return all counts so far as one poll."""
        events = {tests.limit.event: (tests.candidate, tests.control) for tests in self._tests}
        candidate, control = self._latencies
        return PairCounts(events, (tuple(candidate), tuple(control)), (self._drawn[0], self._drawn[1]))

    def verdict(self, is_over: bool) -> StepVerdict:
        """Judge all counts so far; with `is_over`, the step's time is up."""
        failed = [reason for tests in self._tests for reason in tests.failures(self._risk())]
        if failed:
            return StepVerdict(StepOutcome.FAIL, tuple(failed))
        waits = self._waits()
        if not waits and is_over:
            return self._gate()
        return StepVerdict(StepOutcome.CONTINUE, tuple(waits) or ("the minimum duration has not elapsed",))

    def _risk(self) -> float:
        """Return each test's part of the risk; the latency test is one more."""
        return self.limits.risk / (1 + sum(tests.test_count for tests in self._tests))

    def _waits(self) -> list[str]:
        fewest = min((tests.candidate.requests for tests in self._tests), default=0)
        if fewest < self.limits.min_requests:
            return [f"{fewest:,} of at least {self.limits.min_requests:,} requests of the candidate"]
        if self.share == 1:
            return []
        missed = self.limits.miss_risk
        return [
            f"{tests}{tests.needed(self.share, missed)}, no decision yet"
            for tests in self._tests
            if not tests.non_inferiority.rejects(missed)
        ]

    def _gate(self) -> StepVerdict:
        drawn, total = self._drawn[0], sum(self._drawn)
        if split_p_value(drawn, total, self.share) < SPLIT_RISK:
            expected = f"expected {self.share:.1%} for the candidate, got {drawn / total:.1%}"
            reason = f"traffic does not follow the weights: {expected}"
            return StepVerdict(StepOutcome.INCONCLUSIVE, (reason,))
        latencies = [_without_lag(counts) for counts in self._latencies]
        candidate_median_s, control_median_s = (median(self.bounds, counts) for counts in latencies)
        ratio = candidate_median_s / control_median_s
        if ratio > self.limits.max_latency_ratio and slower_p_value(*latencies) < self._risk():
            return StepVerdict(StepOutcome.FAIL, (f"the median latency is {ratio:.2f} times the control's",))
        return StepVerdict(StepOutcome.PASS, tuple(str(tests) for tests in self._tests))


def median(bounds: Sequence[float], counts: Sequence[int]) -> float:
    """Return the median of latencies from the requests per bucket; `nan` without any."""
    return quantile(0.5, dict(zip((*bounds, math.inf), counts, strict=True)))


def _without_lag(counts: Sequence[int]) -> list[int]:
    return [int(count) for count in without_lag(dict(enumerate(counts))).values()]


def _percent(count: EventCount) -> str:
    return f"{count.rate:.2%}" if count.requests else "none"


@cache
def requests_needed(limit: EventLimit, share: float, rate: float, risk: float) -> int:
    """Return roughly how many requests to both together show that an equal candidate is not worse."""
    increase = limit.increase or limit.max_rate
    low, high = 1.0, 1.0
    while high < MAX_NEEDED and not _shows(high, share, rate, risk, increase):
        low, high = high, 2 * high
    while high / low > 1.02:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _shows(middle, share, rate, risk, increase) else (middle, high)
    return math.ceil(high)


@cache
def polls_needed(limit: EventLimit, risk: float) -> int:
    """Return how many polls show that an equal candidate is not worse, for events in phases."""
    evidence = BettingTest(limit.increase or limit.max_rate, against_smaller=False, is_in_blocks=True)
    for count in range(1, MAX_POLLS):
        evidence.add(EventCount(1, 0), EventCount(1, 0))
        if evidence.rejects(risk):
            return count
    return MAX_POLLS


def _shows(total: float, share: float, rate: float, risk: float, increase: float) -> bool:
    evidence = BettingTest(increase, against_smaller=False)
    candidate = max(1, round(total * share))
    control = max(0, round(total * (1 - share)))
    evidence.add(EventCount(candidate, round(candidate * rate)), EventCount(control, round(control * rate)))
    return evidence.rejects(risk)

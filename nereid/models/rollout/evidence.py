"""Tests of two rates that may be looked at after every request: the risk does not grow with the looks.

A fixed-size test that is looked at 30 times has 29 % false alarms instead of 5 %. These tests bet on the next
counts instead. If the hypothesis is true, the capital of a bet does not grow on average, so it exceeds 1/α
at any time with a probability of at most α.

Source: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting (2024); Ville's
inequality. The bet on two rates is derived at `Evidence._log_return`.

The tests at the end of a step, of latencies and of the split, are ordinary ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Shares of the largest bet that cannot lose more than the capital. The capital is divided among them, so
# that some of them suit the true rates.
SHARES = tuple(0.9 * 0.5**power for power in range(10))


@dataclass(frozen=True, slots=True)
class Tally:
    """Requests, and those of them with an event such as an error."""

    requests: int
    events: int

    def __post_init__(self) -> None:
        if not 0 <= self.events <= self.requests:
            raise ValueError(f"expected 0 ≤ events ≤ requests, got {self.events} of {self.requests}")

    @property
    def rate(self) -> float:
        """The share of requests with an event; 0 without requests."""
        return self.events / self.requests if self.requests else 0.0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.requests + other.requests, self.events + other.events)


NONE = Tally(0, 0)


class Evidence:
    """Capital of bets against one hypothesis about the rate of a candidate and that of its control.

    With `in_blocks`, there is one bet on the difference of both rates in each block, that is, in each call of
    `add`. If one variant is slow for some seconds, all its requests of these seconds are slow. Requests are
    then not independent, so their number in a block does not count, only the blocks do.

    Args:
        margin: the difference of the rates at the edge of the hypothesis, candidate minus control.
        against_smaller: whether the hypothesis is that the difference is at most `margin`, so that a worse
            candidate makes the capital grow; otherwise, that it is at least `margin`.
        in_blocks: whether the requests of one call depend on each other.
    """

    def __init__(self, margin: float, against_smaller: bool, in_blocks: bool = False) -> None:
        if not -1 < margin < 1:
            raise ValueError(f"expected a margin between -1 and 1, got {margin}")
        self._margin, self._sign, self._in_blocks = margin, 1 if against_smaller else -1, in_blocks
        self._logs = [0.0] * len(SHARES)

    def add(self, candidate: Tally, control: Tally | None) -> None:
        """Bet on the counts since the last call.

        Without a control (None), the hypothesis is about the candidate's rate alone. Counts in which one of
        both has no requests compare nothing, and are left out.
        """
        if not candidate.requests or (control and not control.requests):
            return
        control = control or NONE
        largest = self._largest_bet(candidate.requests / (candidate.requests + control.requests))
        self._logs = [
            log + self._log_return(self._sign * share * largest, candidate, control)
            for log, share in zip(self._logs, SHARES, strict=True)
        ]

    @property
    def log_capital(self) -> float:
        """Natural logarithm of the capital, which begins with 1."""
        top = max(self._logs)
        return top + math.log(sum(math.exp(log - top) for log in self._logs) / len(self._logs))

    def is_enough(self, risk: float) -> bool:
        """Return whether the hypothesis is rejected; `risk` is the probability of a wrong rejection."""
        return self.log_capital >= -math.log(risk)

    def _largest_bet(self, share: float) -> float:
        """Return the largest bet with a capital that stays positive; `share` is the candidate's."""
        if self._in_blocks:  # a difference is at least -1 and at most 1
            return 1 / (1 + self._sign * self._margin)
        worst_event = 1 / share - self._margin
        worst_control = self._margin + (1 / (1 - share) if share < 1 else 0.0)
        # The smallest value of the weighted event minus the margin, in the direction of the bet.
        loss = max(worst_control, self._margin) if self._sign > 0 else max(worst_event, -self._margin)
        return 1 / loss if loss > 0 else 1.0

    def _log_return(self, bet: float, candidate: Tally, control: Tally) -> float:
        """Return the logarithm of what a bet makes of one unit of capital.

        Each request of the candidate brings `1 + bet * (event / s - margin)`, each request of the control
        `1 + bet * (-event / (1 - s) - margin)`, with s the candidate's share of these requests. The
        expectation of the product is x^(s n) y^((1-s) n) with x and y the two means; by the inequality of the
        arithmetic and the geometric mean it is at most (1 + bet * (difference of the rates - margin))^n. So
        it is at most 1 if the hypothesis is true, whatever the rate of the control is.
        """
        if self._in_blocks:
            return math.log1p(bet * (candidate.rate - control.rate - self._margin))
        total = candidate.requests + control.requests
        share, base = candidate.requests / total, 1 - bet * self._margin
        pairs: Sequence[tuple[int, float]] = (
            (candidate.events, base + bet / share),
            (control.events, base - bet / (1 - share) if share < 1 else base),
            (total - candidate.events - control.events, base),
        )
        return sum(count * math.log(factor) for count, factor in pairs if count)


def chance_of_slower(candidate: Sequence[int], control: Sequence[int]) -> float:
    """Return the probability that two equal services show a candidate that is at least this much slower.

    This is the p-value of the one-sided rank test of Mann and Whitney, with the normal approximation and the
    correction for ties, because all requests of a bucket are ties. Without requests it is 1.

    Source: Lehmann, Nonparametrics (2006), 1.2 and 1.4.
    """
    ours, theirs = sum(candidate), sum(control)
    total = ours + theirs
    if not ours or not theirs:
        return 1.0
    below, wins = 0, 0.0
    for mine, other in zip(candidate, control, strict=True):
        wins += mine * (below + other / 2)
        below += other
    ties = sum((mine + other) ** 3 - (mine + other) for mine, other in zip(candidate, control, strict=True))
    variance = ours * theirs / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:  # all requests are in one bucket
        return 1.0
    return _upper_tail((wins - ours * theirs / 2 - 0.5) / math.sqrt(variance))


def chance_of_split(requests: int, total: int, share: float) -> float:
    """Return the probability of a split at least this far from its share, if requests are split by it.

    This is the p-value of the chi-square test with one degree of freedom.
    """
    if not total or not 0 < share < 1:
        return 1.0
    score = abs(requests - share * total) / math.sqrt(total * share * (1 - share))
    return 2 * _upper_tail(score)


def _upper_tail(score: float) -> float:
    return math.erfc(score / math.sqrt(2)) / 2

"""Tests of two rates that may be looked at after every request: the risk does not grow with the looks.

A fixed-size test that is looked at 30 times has 29 % false alarms instead of 5 %. These tests bet on the next
counts instead. If the hypothesis is true, the capital of a bet does not grow on average, so it exceeds 1/α
at any time with a probability of at most α.

Source: Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting (2024); Ville's
inequality. The bet on two rates is derived at `_log_return`.
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


class Evidence:
    """Capital of bets against one hypothesis about the rate of a candidate and that of its control.

    Args:
        margin: the difference of the rates at the edge of the hypothesis, candidate minus control.
        against_smaller: whether the hypothesis is that the difference is at most `margin`, so that a worse
            candidate makes the capital grow; otherwise, that it is at least `margin`.
    """

    def __init__(self, margin: float, against_smaller: bool) -> None:
        _check(margin)
        self._margin, self._sign = margin, 1 if against_smaller else -1
        self._logs = [0.0] * len(SHARES)

    def add(self, candidate: Tally, control: Tally | None) -> None:
        """Bet on the counts since the last call.

        Without a control (None), the hypothesis is about the candidate's rate alone. Counts in which one of
        both has no requests compare nothing, and are left out.
        """
        if not candidate.requests or (control and not control.requests):
            return
        control = control or Tally(0, 0)
        largest = self._largest_bet(candidate.requests / (candidate.requests + control.requests))
        self._logs = [
            log + _log_return(self._sign * share * largest, self._margin, candidate, control)
            for log, share in zip(self._logs, SHARES, strict=True)
        ]

    @property
    def log_capital(self) -> float:
        """Natural logarithm of the capital, which begins with 1."""
        return _log_mean(self._logs)

    def is_enough(self, risk: float) -> bool:
        """Return whether the hypothesis is rejected; `risk` is the probability of a wrong rejection."""
        return self.log_capital >= -math.log(risk)

    def _largest_bet(self, share: float) -> float:
        """Return the largest bet with a capital that stays positive; `share` is the candidate's."""
        worst_event = 1 / share - self._margin
        worst_control = self._margin + (1 / (1 - share) if share < 1 else 0.0)
        # The smallest value of the weighted event minus the margin, in the direction of the bet.
        loss = max(worst_control, self._margin) if self._sign > 0 else max(worst_event, -self._margin)
        return 1 / loss if loss > 0 else 1.0


class BlockEvidence:
    """Capital of bets like those of `Evidence`, with one bet on the difference of both rates in each block.

    A block is one look. If one variant is slow for some seconds, all its requests of these seconds are slow.
    Requests are then not independent, so their number in a block does not count, only the blocks do.
    """

    def __init__(self, margin: float, against_smaller: bool) -> None:
        _check(margin)
        self._margin, self._sign = margin, 1 if against_smaller else -1
        self._logs = [0.0] * len(SHARES)

    def add(self, candidate: Tally, control: Tally | None) -> None:
        """Bet on the counts of a block; without requests of both, nothing is compared."""
        if not candidate.requests or not control or not control.requests:
            return
        # A difference is at least -1 and at most 1.
        largest = 1 / (1 + self._sign * self._margin)
        won = self._sign * (candidate.rate - control.rate - self._margin)
        self._logs = [
            log + math.log1p(share * largest * won) for log, share in zip(self._logs, SHARES, strict=True)
        ]

    @property
    def log_capital(self) -> float:
        """Natural logarithm of the capital, which begins with 1."""
        return _log_mean(self._logs)

    def is_enough(self, risk: float) -> bool:
        """Return whether the hypothesis is rejected; `risk` is the probability of a wrong rejection."""
        return self.log_capital >= -math.log(risk)


def _check(margin: float) -> None:
    if not -1 < margin < 1:
        raise ValueError(f"expected a margin between -1 and 1, got {margin}")


def _log_mean(logs: Sequence[float]) -> float:
    """Return the logarithm of the mean of numbers, from their logarithms."""
    top = max(logs)
    return top + math.log(sum(math.exp(log - top) for log in logs) / len(logs))


def _log_return(bet: float, margin: float, candidate: Tally, control: Tally) -> float:
    """Return the logarithm of what a bet makes of one unit of capital.

    Each request of the candidate brings `1 + bet * (event / s - margin)`, each request of the control
    `1 + bet * (-event / (1 - s) - margin)`, with s the candidate's share of these requests. The expectation
    of the product is x^(s n) y^((1-s) n) with x and y the two means; by the inequality of the arithmetic and
    the geometric mean it is at most (1 + bet * (difference of the rates - margin))^n. So it is at most 1 if
    the hypothesis is true, whatever the rate of the control is.
    """
    total = candidate.requests + control.requests
    share, base = candidate.requests / total, 1 - bet * margin
    pairs: Sequence[tuple[int, float]] = (
        (candidate.events, base + bet / share),
        (control.events, base - bet / (1 - share) if share < 1 else base),
        (total - candidate.events - control.events, base),
    )
    return sum(count * math.log(factor) for count, factor in pairs if count)

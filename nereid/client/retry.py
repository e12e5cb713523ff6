"""Retries of requests: only after faults that are safe to repeat, within a budget and a deadline."""

import time

from nereid import retry
from nereid.client.classifier_errors import ClassifierError, TimedOut
from nereid.retry import MAX_ATTEMPTS, Budget


class Attempts:
    """The attempts of one request: their time limit, and the pauses between them.

    Args:
        budget: shared by all requests of a classifier.
        timeout_s: limit of all attempts and the pauses between them, in seconds.
    """

    def __init__(self, budget: Budget, timeout_s: float) -> None:
        self.count = 1
        self._budget = budget
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Return the time left for this attempt, in seconds.

        Raises:
            TimedOut: no time is left.
        """
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimedOut(f"no response within {self._timeout_s:g} s")
        return remaining_s

    def succeeded(self) -> None:
        """Record the response to the request."""
        self._budget.succeeded()

    def pause_s(self, error: ClassifierError) -> float | None:
        """Return the pause before the next attempt in seconds; None if the request is not sent again."""
        if not error.is_repeatable or not self._budget.failed() or self.count == MAX_ATTEMPTS:
            return None
        pause_s = retry.pause_s(self.count)
        self.count += 1
        if time.monotonic() + pause_s >= self._deadline:
            return None
        return pause_s

"""When a request is sent again: only after faults that are safe to repeat, within a budget and a deadline."""

import random
import threading
import time

from clients.errors import ClassifierError, TimedOut

MOST_ATTEMPTS = 4
FIRST_PAUSE_S, PAUSE_FACTOR = 0.1, 2.0


class Budget:
    """How much may be repeated: while most requests fail, nothing is, so that retries add no load to a fault.

    Source: gRPC proposal A6, `retryThrottling`: a failure takes a token, a success gives a tenth back, and
    more than half of the tokens must be there.
    """

    MOST, GAIN = 10.0, 0.1

    def __init__(self) -> None:
        self._tokens = self.MOST
        self._lock = threading.Lock()

    def succeeded(self) -> None:
        """Note a request that was answered."""
        with self._lock:
            self._tokens = min(self.MOST, self._tokens + self.GAIN)

    def failed(self) -> bool:
        """Note a failure; tells whether the request may be sent again."""
        with self._lock:
            self._tokens = max(0.0, self._tokens - 1)
            return self._tokens > self.MOST / 2


class Attempts:
    """The attempts of one request: how long it may still take, and whether there is another one.

    Args:
        budget: shared by all requests of a classifier.
        timeout_s: for all attempts and the pauses between them.
    """

    def __init__(self, budget: Budget, timeout_s: float) -> None:
        self.count = 1
        self._budget = budget
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Return how long this attempt may take.

        Raises:
            TimedOut: the time is up.
        """
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimedOut(f"no answer within {self._timeout_s:g} s")
        return remaining_s

    def succeeded(self) -> None:
        """Note that the request was answered."""
        self._budget.succeeded()

    def pause_s(self, error: ClassifierError) -> float | None:
        """Return how long to wait before the next attempt; None if the request is not sent again.

        Source: gRPC proposal A6: a random share of a bound that doubles.
        """
        if not error.is_repeatable or not self._budget.failed() or self.count == MOST_ATTEMPTS:
            return None
        bound_s = FIRST_PAUSE_S * PAUSE_FACTOR ** (self.count - 1)
        self.count += 1
        pause_s = random.uniform(0, bound_s)
        if time.monotonic() + pause_s >= self._deadline:
            return None
        return pause_s

"""When a request is sent again: only after faults that are safe to repeat, within a budget and a deadline."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nereid.client.classifier_errors import ClassifierError, TimedOut

MAX_ATTEMPTS = 4
FIRST_PAUSE_S, PAUSE_FACTOR, JITTER = 0.1, 2.0, 0.2


class Budget:
    """How much may be repeated: while most requests fail, nothing is, so that retries add no load to a fault.

    The more requests are in flight together, the more tokens there are, so that all of them may be lost at
    once, as with a server that dies, and be sent again.

    Source: gRPC proposal A6, `retryThrottling`: a failure takes a token, a success gives a tenth back, and
    more than half of the tokens must be there.
    """

    MIN_TOKENS, TOKENS_PER_REQUEST, GAIN = 10.0, 4.0, 0.1

    def __init__(self) -> None:
        self._taken = 0.0
        self._in_flight = 0
        self._lock = threading.Lock()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request as long as the context lasts, with the pauses between its attempts."""
        with self._lock:
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1

    def succeeded(self) -> None:
        """Note a request that was answered."""
        with self._lock:
            self._taken = max(0.0, self._taken - self.GAIN)

    def failed(self) -> bool:
        """Note a failure; tells whether the request may be sent again."""
        with self._lock:
            most = max(self.MIN_TOKENS, self.TOKENS_PER_REQUEST * self._in_flight)
            # What was taken stays so when fewer are in flight: else each new crowd would repeat again.
            self._taken = max(self._taken, min(most, self._taken + 1))
            return self._taken < most / 2


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

        Source: gRPC connection backoff: doubled each time, a fifth more or less, so that not all come back
        together, nor are all attempts over before a proxy has noticed that a server is gone.
        """
        if not error.is_repeatable or not self._budget.failed() or self.count == MAX_ATTEMPTS:
            return None
        pause_s = FIRST_PAUSE_S * PAUSE_FACTOR ** (self.count - 1) * random.uniform(1 - JITTER, 1 + JITTER)
        self.count += 1
        if time.monotonic() + pause_s >= self._deadline:
            return None
        return pause_s

"""Request retries: only after faults that are safe to retry, within a budget and a deadline."""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nereid.client.client_errors import NereidError, TimedOut

MAX_ATTEMPTS = 4
FIRST_PAUSE_S, PAUSE_FACTOR, JITTER = 0.1, 2.0, 0.2


class RetryBudget:
    """Token bucket for retries: while most requests fail, none is retried, so retries add no load.

    The bucket grows with the requests in flight, so that if a server dies and all of them fail together,
    they can all be sent again. It keeps its size until it is full, because some may notice late.

    Attributes:
        spent_tokens: tokens currently missing from the bucket.
        running: requests in flight.

    Source: gRPC proposal A6, `retryThrottling`. A failure takes a token, a success returns a tenth, and a
    retry needs more than half of the tokens.
    """

    MIN_TOKENS, TOKENS_PER_REQUEST, GAIN = 10.0, 4.0, 0.1

    def __init__(self) -> None:
        self.spent_tokens = 0.0
        self.running = 0
        self._max_running = 0  # since the bucket was full
        self._lock = threading.Lock()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request as in flight, including pauses between its attempts, while the context is open."""
        with self._lock:
            self.running += 1
        try:
            yield
        finally:
            with self._lock:
                self.running -= 1

    def record_success(self) -> None:
        """Record a request that got a response."""
        with self._lock:
            self.spent_tokens = max(0.0, self.spent_tokens - self.GAIN)
            if not self.spent_tokens:
                self._max_running = 0

    def record_failure(self) -> bool:
        """Record a failure and return whether the request may be sent again."""
        with self._lock:
            self._max_running = max(self.running, self._max_running)
            size = max(self.MIN_TOKENS, self.TOKENS_PER_REQUEST * self._max_running)
            # Spent tokens stay spent when the bucket shrinks; otherwise each new burst would be retried.
            self.spent_tokens = max(self.spent_tokens, min(size, self.spent_tokens + 1))
            return self.spent_tokens < size / 2


def next_pause_s(budget: RetryBudget | None, attempt: int, is_retryable: bool) -> float | None:
    """Return the pause before the next attempt of a failed request in seconds, None if there must be none.

    The pauses outlast the time a proxy needs to detect a dead server. The jitter spreads the retries of
    many clients.

    Source: gRPC connection backoff: doubles each time, with 20 % jitter.

    Args:
        budget: takes the failure; None if requests are never sent again.
        attempt: number of the failed attempt, from 1.
        is_retryable: whether the fault is safe to retry.
    """
    if not (is_retryable and budget and budget.record_failure()) or attempt == MAX_ATTEMPTS:
        return None
    return FIRST_PAUSE_S * PAUSE_FACTOR ** (attempt - 1) * random.uniform(1 - JITTER, 1 + JITTER)


class Attempts:
    """The attempts of one request: their time limit and the pauses between them.

    Args:
        budget: shared by all requests of a client.
        timeout_s: time limit for all attempts and the pauses between them, in seconds.
    """

    def __init__(self, budget: RetryBudget, timeout_s: float) -> None:
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

    def record_failure(self, error: NereidError) -> float | None:
        """Return the pause before the next attempt in seconds, or None if the request is not retried."""
        pause_s = next_pause_s(self._budget, self.count, error.is_repeatable)
        if pause_s is None or time.monotonic() + pause_s >= self._deadline:
            return None
        self.count += 1
        return pause_s

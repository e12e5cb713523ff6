"""The policy of retries: a budget, and growing pauses. No I/O."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MAX_ATTEMPTS = 4
FIRST_PAUSE_S, PAUSE_FACTOR, JITTER = 0.1, 2.0, 0.2


class Budget:
    """Token bucket of retries: while most requests fail, no request is repeated, so retries add no load.

    The bucket grows with the requests in flight. If a server dies, all of them may fail together, and are
    sent again.

    Attributes:
        taken: tokens that are missing.
        running: requests in flight.

    Source: gRPC proposal A6, `retryThrottling`. A failure takes a token, a success returns a tenth, and a
    retry needs more than half of the tokens.
    """

    MIN_TOKENS, TOKENS_PER_REQUEST, GAIN = 10.0, 4.0, 0.1

    def __init__(self) -> None:
        self.taken = 0.0
        self.running = 0
        self._lock = threading.Lock()

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Count a request, with the pauses between its attempts, while the context lasts."""
        with self._lock:
            self.running += 1
        try:
            yield
        finally:
            with self._lock:
                self.running -= 1

    def succeeded(self) -> None:
        """Record a request with a response."""
        with self._lock:
            self.taken = max(0.0, self.taken - self.GAIN)

    def failed(self) -> bool:
        """Record a failure, and return whether the request may be sent again."""
        with self._lock:
            size = max(self.MIN_TOKENS, self.TOKENS_PER_REQUEST * self.running)
            # Taken tokens stay taken when the bucket shrinks: otherwise each new burst would be repeated.
            self.taken = max(self.taken, min(size, self.taken + 1))
            return self.taken < size / 2


def pause_s(attempt: int) -> float:
    """Return the pause after an attempt, the first of which is 1, in seconds.

    The pauses outlast the time in which a proxy detects a dead server. The jitter spreads the retries of
    many clients.

    Source: gRPC connection backoff: doubled each time, with a jitter of a fifth.
    """
    return FIRST_PAUSE_S * PAUSE_FACTOR ** (attempt - 1) * random.uniform(1 - JITTER, 1 + JITTER)

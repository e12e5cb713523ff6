"""Circuit breaker and retry budget of a route; pure, with the time as an argument."""

from collections import deque
from collections.abc import Callable
from enum import IntEnum

from nereid.backends.routing.assignment import BreakerSettings


class State(IntEnum):
    """State of a breaker: it lets all requests pass, one trial, or none."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Keeps requests away from a variant whose last requests failed.

    It considers the requests of the last `window_s` seconds, at least the last `min_requests`. It opens when
    at least `error_ratio` of them failed, or immediately when it is tripped. After `open_s` one trial request
    passes, whose outcome closes or opens the breaker again. `on_change` receives each new state.
    Not thread-safe: the caller holds a lock.
    """

    def __init__(
        self, settings: BreakerSettings, on_change: Callable[[State], None] = lambda state: None
    ) -> None:
        self.state = State.CLOSED
        self._settings, self._on_change = settings, on_change
        self._outcomes: deque[tuple[float, bool]] = deque()
        self._failures = 0
        self._changed_at = 0.0
        self._is_trying = False

    def allows(self, now: float) -> bool:
        """Return whether a request may pass; a half-open breaker lets one pass, the trial."""
        if self.state is State.OPEN and now - self._changed_at >= self._settings.open_s:
            self._change(State.HALF_OPEN, now)
        if self.state is State.HALF_OPEN and not self._is_trying:
            self._is_trying = True
            return True
        return self.state is State.CLOSED

    def record(self, has_failed: bool | None, now: float, is_trial: bool = False) -> None:
        """Record the outcome of an allowed request; None if it says nothing about the variant.

        While the breaker is half open, only the trial counts, not earlier requests.
        """
        if is_trial and self.state is State.HALF_OPEN:
            self._is_trying = False
            if has_failed is not None:
                self._change(State.OPEN if has_failed else State.CLOSED, now)
        elif self.state is State.CLOSED and has_failed is not None:
            self._outcomes.append((now, has_failed))
            self._failures += has_failed
            self._forget(now)
            if self._must_open():
                self._change(State.OPEN, now)

    def allow_trial(self, now: float) -> None:
        """Let the next request through as a trial, without the rest of the wait."""
        if self.state is State.OPEN:
            self._change(State.HALF_OPEN, now)

    def trip(self, now: float) -> None:
        """Open immediately, or stay open: the variant is unreachable."""
        if self.state is not State.OPEN:
            self._change(State.OPEN, now)

    def _must_open(self) -> bool:
        count = len(self._outcomes)
        return count >= self._settings.min_requests and self._failures / count >= self._settings.error_ratio

    def _forget(self, now: float) -> None:
        oldest_kept = now - self._settings.window_s
        while len(self._outcomes) > self._settings.min_requests and self._outcomes[0][0] < oldest_kept:
            self._failures -= self._outcomes.popleft()[1]

    def _change(self, state: State, now: float) -> None:
        self.state = state
        self._changed_at = now
        self._is_trying = False
        self._outcomes.clear()
        self._failures = 0
        self._on_change(state)


class RetryBudget:
    """Limit on retries, so that they never multiply a failure.

    A failure takes a token and a success returns a tenth of one; a retry needs more than half of them.

    Source: gRPC proposal A6, retry throttling.
    """

    MAX_TOKENS, RATIO = 10.0, 0.1

    def __init__(self) -> None:
        self._tokens = self.MAX_TOKENS

    def succeeded(self) -> None:
        """Record a request that needs no retry."""
        self._tokens = min(self.MAX_TOKENS, self._tokens + self.RATIO)

    def may_retry(self) -> bool:
        """Record a failed request, and return whether it may be sent again."""
        self._tokens = max(0.0, self._tokens - 1)
        return self._tokens > self.MAX_TOKENS / 2

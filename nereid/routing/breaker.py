"""Circuit breaker and retry budget of a route: pure, the time is an argument."""

from collections import deque
from collections.abc import Callable
from enum import IntEnum

from nereid.routing.assignment import BreakerSettings


class State(IntEnum):
    """What a breaker lets pass: all, one request that tries, or nothing."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Whether a variant gets requests, from how its last ones went.

    It opens when, of the requests of the last `window_s` seconds or of the last `min_requests`, whichever are
    more, at least `error_ratio` failed, and at once when it is tripped. After `open_s` one request tries, and
    its outcome decides.
    Not thread-safe: its caller holds a lock.

    Args:
        settings: when it opens, and for how long.
        tell: called with the state that it turns to.
    """

    def __init__(self, settings: BreakerSettings, tell: Callable[[State], None] = lambda state: None) -> None:
        self.state = State.CLOSED
        self._settings, self._tell = settings, tell
        self._outcomes: deque[tuple[float, bool]] = deque()
        self._failures = 0
        self._opened_at = 0.0
        self._is_trying = False

    def allows(self, now: float) -> bool:
        """Tell whether a request may go; while the breaker is half open, one: that which tries."""
        if self.state is State.OPEN and now - self._opened_at >= self._settings.open_s:
            self._turn(State.HALF_OPEN, now)
        if self.state is State.HALF_OPEN and not self._is_trying:
            self._is_trying = True
            return True
        return self.state is State.CLOSED

    def record(self, has_failed: bool | None, now: float, is_trial: bool = False) -> None:
        """Take note of how a request that was allowed went; None for one that says nothing.

        While the breaker is half open, requests from before say nothing either: only the trial counts.
        """
        if is_trial and self.state is State.HALF_OPEN:
            self._is_trying = False
            if has_failed is not None:
                self._turn(State.OPEN if has_failed else State.CLOSED, now)
        elif self.state is State.CLOSED and has_failed is not None:
            self._outcomes.append((now, has_failed))
            self._failures += has_failed
            self._forget(now)
            if self._must_open():
                self._turn(State.OPEN, now)

    def trip(self, now: float) -> None:
        """Open at once, or stay open: the variant cannot be reached."""
        if self.state is not State.OPEN:
            self._turn(State.OPEN, now)

    def _must_open(self) -> bool:
        count = len(self._outcomes)
        return count >= self._settings.min_requests and self._failures / count >= self._settings.error_ratio

    def _forget(self, now: float) -> None:
        oldest_kept = now - self._settings.window_s
        while len(self._outcomes) > self._settings.min_requests and self._outcomes[0][0] < oldest_kept:
            self._failures -= self._outcomes.popleft()[1]

    def _turn(self, state: State, now: float) -> None:
        self.state = state
        self._opened_at = now
        self._is_trying = False
        self._outcomes.clear()
        self._failures = 0
        self._tell(state)


class RetryBudget:
    """How many requests may be sent a second time: few, so that retries never multiply a failure.

    A failure takes a token and a success gives a tenth of one back; more than half of them must be left.

    Source: gRPC proposal A6, retry throttling.
    """

    MAX_TOKENS, RATIO = 10.0, 0.1

    def __init__(self) -> None:
        self._tokens = self.MAX_TOKENS

    def succeeded(self) -> None:
        """Take note of a request that needs no retry."""
        self._tokens = min(self.MAX_TOKENS, self._tokens + self.RATIO)

    def may_retry(self) -> bool:
        """Take note of a request that failed, and tell whether it may be sent again."""
        self._tokens = max(0.0, self._tokens - 1)
        return self._tokens > self.MAX_TOKENS / 2

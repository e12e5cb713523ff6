"""Who is let in to the server: as many as the limit allows, and nobody whose time is too short."""

import time
from collections.abc import Callable

from clients.gateway.errors import Failure
from clients.gateway.limit import Gradient

MOST_RETRY_AFTER_S = 30.0


class Admission:
    """Counts what is in flight to the server against an adaptive limit.

    Args:
        most: upper bound of the limit.
        clock: seconds that never jump.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gradient = Gradient(most, clock())
        self.in_flight = 0

    @property
    def limit(self) -> int:
        """How many may be in flight now."""
        return self._gradient.limit

    def check(self, remaining_s: float) -> None:
        """Refuse a request that could not be answered in time; takes nothing.

        Raises:
            Failure: `overloaded`, with the time after which there will be room.
        """
        if self.in_flight >= self._gradient.limit:
            raise Failure("overloaded", "too many images are in flight; come later", self.retry_after_s())
        # One is always let through: else a prediction that was wrong would never be mended.
        rtt_s = self._gradient.rtt_s
        if self.in_flight and rtt_s > remaining_s:
            raise Failure(
                "overloaded",
                f"an answer takes about {rtt_s:.2g} s now, and {remaining_s:.2g} s are left",
                self.retry_after_s(),
            )

    def take(self, remaining_s: float) -> "Permit":
        """Let a request in.

        Raises:
            Failure: as `check` does.
        """
        self.check(remaining_s)
        self.in_flight += 1
        return Permit(self)

    def retry_after_s(self) -> float:
        """Return how long the server needs for what it has, as it worked lately."""
        rate_per_s = self._gradient.rate_per_s
        return min(MOST_RETRY_AFTER_S, self.in_flight / rate_per_s) if rate_per_s else 1.0


class Permit:
    """The right of one request to be in flight; given back exactly once, whatever becomes of it."""

    __slots__ = ("_admission", "_began_s", "_is_held")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._began_s = admission._clock()
        self._is_held = True

    def answered(self) -> None:
        """Give it back after a right answer, which tells how fast the server is."""
        self.release()
        admission, now_s = self._admission, self._admission._clock()
        admission._gradient.sample(now_s - self._began_s, admission.in_flight, now_s)

    def refused(self) -> None:
        """Give it back after the server said that it has too much to do."""
        self.release()
        self._admission._gradient.dropped()

    def release(self) -> None:
        """Give it back; nothing is learnt."""
        if self._is_held:
            self._is_held = False
            self._admission.in_flight -= 1

    def rest_s(self) -> float:
        """Return how long the server is still busy with a request that was cancelled.

        What it has dispatched it computes to the end, and does not tell; so a mean round trip is assumed.
        """
        admission = self._admission
        return max(0.0, admission._gradient.rtt_s - (admission._clock() - self._began_s))

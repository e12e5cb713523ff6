"""Who is let in to the server: as many as the limit allows, in turn, and nobody who would wait too long."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from nereid.gateway.admission.concurrency_limit import Gradient
from nereid.gateway.failures import Failure

MOST_RETRY_AFTER_S = 30.0
# So many may wait for each that is in flight: an answer takes at most about five round trips.
WAITING_PER_PERMIT = 4


class Admission:
    """Counts what is in flight to the server against an adaptive limit, and lets the next one wait.

    What waits here can still leave, and costs the server nothing; in Triton's queue it could not.

    Args:
        most: upper bound of the limit.
        clock: seconds that never jump.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gradient = Gradient(most, clock())
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.in_flight = 0

    @property
    def limit(self) -> int:
        """How many may be in flight now."""
        return self._gradient.limit

    @property
    def waiting(self) -> int:
        """How many wait for room."""
        return len(self._waiting)

    def check(self, remaining_s: float) -> None:
        """Refuse a request that would wait too long, or could not be answered in time; takes nothing.

        Raises:
            Failure: `overloaded`, with the time after which there will be room.
        """
        waiting = self.waiting
        if waiting >= WAITING_PER_PERMIT * self._gradient.steady:
            raise Failure("overloaded", f"{waiting} images are waiting; come later", self.retry_after_s())
        needed_s = self._needed_s(1)
        # One is always let through: else a prediction that was wrong would never be mended.
        if self.in_flight and needed_s > remaining_s:
            raise Failure(
                "overloaded",
                f"an answer takes about {needed_s:.2g} s now, and {remaining_s:.2g} s are left",
                self.retry_after_s(),
            )

    async def take(self, remaining_s: float) -> "Permit":
        """Let a request in, when its turn comes.

        Raises:
            Failure: as `check` does; `deadline_exceeded` if its turn did not come in time.
        """
        self.check(remaining_s)
        if self.in_flight < self.limit and not self._waiting:
            self.in_flight += 1
            return Permit(self)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(remaining_s):
                await turn
        except TimeoutError:
            self._give_up(turn)
            raise Failure("deadline_exceeded", f"no room within {remaining_s:.3g} s") from None
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        return Permit(self)

    def _give_up(self, turn: "asyncio.Future[None]") -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif not turn.cancelled():  # its turn had come in the same moment
            self.leave()

    def leave(self) -> None:
        """Make room, and give the first of those that wait their turn."""
        self.in_flight -= 1
        while self._waiting and self.in_flight < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.in_flight += 1
                turn.set_result(None)

    def retry_after_s(self) -> float:
        """Return how long the server needs for what it has and what waits, as it worked lately."""
        return min(MOST_RETRY_AFTER_S, self._needed_s(self.in_flight / self.limit))

    def _needed_s(self, round_trips: float) -> float:
        """Return how long so many round trips take after all that waits: each lets as many in as may be."""
        return self._gradient.rtt_s * (round_trips + self.waiting / self.limit)


class Permit:
    """The right of one request to be in flight; given back exactly once, whatever becomes of it."""

    __slots__ = ("_admission", "_began_s", "_is_held")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._began_s = admission._clock()
        self._is_held = True

    def answered(self) -> None:
        """Give it back after a right answer, which tells how fast the server is."""
        admission, now_s = self._admission, self._admission._clock()
        admission._gradient.sample(now_s - self._began_s, admission.in_flight - 1, now_s)
        self.release()

    def refused(self) -> None:
        """Give it back after the server said that it has too much to do."""
        self._admission._gradient.dropped()
        self.release()

    def release(self) -> None:
        """Give it back; nothing is learnt."""
        if self._is_held:
            self._is_held = False
            self._admission.leave()

    def rest_s(self) -> float:
        """Return how long the server is still busy with a request that was cancelled.

        What it has dispatched it computes to the end, and does not tell; so a mean round trip is assumed.
        """
        admission = self._admission
        return max(0.0, admission._gradient.rtt_s - (admission._clock() - self._began_s))

"""Admission control: a limited number of requests in flight, a queue, and early rejection."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from nereid.gateway.admission.concurrency_limit import ConcurrencyLimit
from nereid.gateway.failures import Failure

MAX_RETRY_AFTER_S = 30.0
# Queue length per request in flight: a response then takes at most about five round trips.
MAX_WAITING_PER_SLOT = 4


class Admission:
    """Limit the requests in flight to the server by an adaptive limit, and queue the next ones.

    A request in this queue can still be cancelled without cost. In Triton's queue it cannot.

    Args:
        max_limit: upper bound of the limit.
        clock: monotonic time in seconds.
    """

    def __init__(self, max_limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._concurrency_limit = ConcurrencyLimit(max_limit, clock())
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.in_flight = 0

    @property
    def limit(self) -> int:
        """The present limit of requests in flight."""
        return self._concurrency_limit.limit

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._waiting)

    def check(self, remaining_s: float) -> None:
        """Reject a request that would wait too long or miss its deadline; takes no slot.

        Raises:
            Failure: `overloaded`, with the time after which a retry makes sense.
        """
        waiting = self.waiting
        if waiting >= MAX_WAITING_PER_SLOT * self._concurrency_limit.steady:
            raise Failure(
                "overloaded", f"{waiting} images are in the queue; retry later", self.retry_after_s()
            )
        needed_s = self._needed_s(1)
        # One request always passes, so that a wrong estimate is corrected.
        if self.in_flight and needed_s > remaining_s:
            raise Failure(
                "overloaded",
                f"a response takes about {needed_s:.2g} s now, but only {remaining_s:.2g} s are left",
                self.retry_after_s(),
            )

    async def take(self, remaining_s: float) -> "Slot":
        """Wait for a slot and take it.

        Raises:
            Failure: as `check`; `deadline_exceeded` if no slot became free in time.
        """
        self.check(remaining_s)
        if self.in_flight < self.limit and not self._waiting:
            self.in_flight += 1
            return Slot(self)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(remaining_s):
                await turn
        except TimeoutError:
            self._give_up(turn)
            raise Failure("deadline_exceeded", f"no slot became free within {remaining_s:.3g} s") from None
        except asyncio.CancelledError:
            self._give_up(turn)
            raise
        return Slot(self)

    def _give_up(self, turn: "asyncio.Future[None]") -> None:
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif not turn.cancelled():  # a slot was assigned in the same moment
            self.leave()

    def leave(self) -> None:
        """Free a slot, and assign it to the first request in the queue."""
        self.in_flight -= 1
        while self._waiting and self.in_flight < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.in_flight += 1
                turn.set_result(None)

    def retry_after_s(self) -> float:
        """Return the estimated time for the requests in flight and in the queue, at the recent speed."""
        return min(MAX_RETRY_AFTER_S, self._needed_s(self.in_flight / self.limit))

    def _needed_s(self, round_trips: float) -> float:
        """Return the duration of the queue and of a number of further round trips."""
        return self._concurrency_limit.rtt_s * (round_trips + self.waiting / self.limit)


class Slot:
    """A slot of one request in flight; released exactly once."""

    __slots__ = ("_admission", "_began_s", "_is_held")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._began_s = admission._clock()
        self._is_held = True

    def answered(self) -> None:
        """Release the slot after a correct response, and record its round trip."""
        admission, now_s = self._admission, self._admission._clock()
        admission._concurrency_limit.sample(now_s - self._began_s, admission.in_flight - 1, now_s)
        self.release()

    def rejected(self) -> None:
        """Release the slot after the server reported overload, and lower the limit."""
        self._admission._concurrency_limit.dropped()
        self.release()

    def release(self) -> None:
        """Release the slot without a sample."""
        if self._is_held:
            self._is_held = False
            self._admission.leave()

    def rest_s(self) -> float:
        """Return the estimated time that the server still works on a cancelled request.

        The server finishes a dispatched request without a report; a mean round trip is assumed.
        """
        admission = self._admission
        return max(0.0, admission._concurrency_limit.rtt_s - (admission._clock() - self._began_s))

"""Admission control: a limited number of requests in flight, a queue, and early rejection."""

import time
from collections.abc import Callable

from nereid.gateway.admission.concurrency_limit import ConcurrencyLimit
from nereid.gateway.admission.turns import Turns
from nereid.gateway.failures import Failure

MAX_RETRY_AFTER_S = 30.0
# Queue length per request in flight: a response then takes at most about five round trips.
MAX_WAITING_PER_SLOT = 4
# Large images of one key that may wait; each takes up to some seconds.
MAX_LARGE_WAITING = 4


class Admission:
    """Limit the requests in flight to the server by an adaptive limit, and queue the next ones.

    A request in this queue can still be cancelled without cost. In Triton's queue it cannot. Keys take turns.
    One large image is in flight at a time, so that the server's other instances serve the small ones.

    Args:
        max_limit: upper bound of the limit.
        clock: monotonic time in seconds.
    """

    def __init__(self, max_limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._concurrency_limit = ConcurrencyLimit(max_limit, clock())
        self._turns, self._large = Turns(lambda: self.limit), Turns(lambda: 1)

    @property
    def limit(self) -> int:
        """The present limit of requests in flight."""
        return self._concurrency_limit.limit

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""
        return self._turns.taken

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return self._turns.waiting + self._large.waiting

    def check(self, remaining_s: float, owner: str = "") -> None:
        """Reject a request that would wait too long or miss its deadline; takes no slot.

        Args:
            remaining_s: the time until the deadline of the request.
            owner: the id of its key; empty without a key.

        Raises:
            Failure: `overloaded`, with the time after which a retry makes sense.
        """
        waiting = self._turns.waiting_before(owner)
        if waiting >= MAX_WAITING_PER_SLOT * self._concurrency_limit.steady:
            raise Failure(
                "overloaded", f"{waiting} images are in the queue; retry later", self.retry_after_s()
            )
        needed_s = self._needed_s(1, waiting)
        # One request always passes, so that a wrong estimate is corrected.
        if self.in_flight and needed_s > remaining_s:
            raise Failure(
                "overloaded",
                f"a response takes about {needed_s:.2g} s now, but only {remaining_s:.2g} s are left",
                self.retry_after_s(),
            )

    async def take(self, remaining_s: float, owner: str = "", is_large: bool = False) -> "Slot":
        """Wait for a slot and take it; arguments as `check`, and whether the image is large.

        Raises:
            Failure: as `check`; `deadline_exceeded` if no slot became free in time.
        """
        self.check(remaining_s, owner)
        if is_large and (waiting := self._large.waiting_of(owner)) >= MAX_LARGE_WAITING:
            raise Failure(
                "overloaded",
                f"{waiting} large images of this key are in the queue; retry later",
                self.retry_after_s(),
            )
        deadline_s = self._clock() + remaining_s
        has_lane = False
        try:
            if is_large:
                await self._large.take(owner, remaining_s)
                has_lane = True
            await self._turns.take(owner, max(0.0, deadline_s - self._clock()))
        except BaseException as error:
            if has_lane:
                self._large.leave()
            if not isinstance(error, TimeoutError):
                raise
            text = f"no slot became free within {remaining_s:.3g} s"
            raise Failure("deadline_exceeded", text) from None
        return Slot(self, is_large)

    def leave(self, is_large: bool) -> None:
        """Free a slot, for the next request in the queue."""
        self._turns.leave()
        if is_large:
            self._large.leave()

    def retry_after_s(self) -> float:
        """Return the estimated time for the requests in flight and in the queue, at the recent speed."""
        return min(MAX_RETRY_AFTER_S, self._needed_s(self.in_flight / self.limit, self.waiting))

    def _needed_s(self, round_trips: float, waiting: int) -> float:
        """Return the duration of a queue and of a number of further round trips."""
        return self._concurrency_limit.rtt_s * (round_trips + waiting / self.limit)


class Slot:
    """A slot of one request in flight; released exactly once."""

    __slots__ = ("_admission", "_began_s", "_is_held", "_is_large")

    def __init__(self, admission: Admission, is_large: bool) -> None:
        self._admission, self._is_large = admission, is_large
        self._began_s = admission._clock()
        self._is_held = True

    def answered(self) -> None:
        """Release the slot after a correct response, and record its round trip unless the image is large."""
        admission, now_s = self._admission, self._admission._clock()
        if not self._is_large:
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
            self._admission.leave(self._is_large)

    def rest_s(self) -> float:
        """Return the estimated time that the server still works on a cancelled request.

        The server finishes a dispatched request without a report; a mean round trip is assumed.
        """
        admission = self._admission
        return max(0.0, admission._concurrency_limit.rtt_s - (admission._clock() - self._began_s))

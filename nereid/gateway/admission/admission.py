"""Admission control: a limited number of requests in flight, a queue, and early rejection."""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from nereid.gateway.admission.concurrency_limit import ConcurrencyLimit
from nereid.gateway.admission.costs import PATIENCE_S, Costs
from nereid.gateway.admission.turns import Turns
from nereid.gateway.failures import Failure
from nereid.vision.imaging.formats.work import LARGE_WORK

MAX_RETRY_AFTER_S = 30.0
# Queue length per request in flight: a response then takes at most about five round trips.
MAX_WAITING_PER_SLOT = 4
# Large images of one key that may wait; each takes up to some seconds.
MAX_LARGE_WAITING = 4
# A large image may take so many times as long as its pixels say, but little takes longer than the deadline of
# a route.
LARGE_MARGIN, MAX_REST_S = 4, 10.0


class Admission:
    """Limit the requests in flight to the server by an adaptive limit, and queue the next ones.

    A request in this queue can still be cancelled without cost. In Triton's queue it cannot. Keys take turns.
    One large image is in flight at a time, so that the server's other instances serve the small ones. So is
    one request of the keys whose requests take as long. No key fills all instances with slow ones.

    Args:
        max_limit: upper bound of the limit.
        clock: monotonic time in seconds.
    """

    def __init__(self, max_limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._concurrency_limit = ConcurrencyLimit(max_limit, clock())
        self._turns, self._large = Turns(lambda: self.limit, clock), Turns(lambda: 1, clock)
        self.costs = Costs(clock)
        # Of each key and model that has requests.
        self._own: dict[tuple[str, str], Turns] = {}

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
        return sum(each.waiting for each in (self._turns, self._large, *self._own.values()))

    def check(self, remaining_s: float, owner: str = "") -> None:
        """Reject a request that would wait too long or miss its deadline; takes no slot.

        Args:
            remaining_s: the time until the deadline of the request.
            owner: the id of its key; empty without a key.

        Raises:
            Failure: `overloaded`, with the time after which a retry makes sense.
        """
        waiting = self._turns.waiting_before(owner)
        if owner:
            waiting += sum(turns.waiting for (name, _), turns in self._own.items() if name == owner)
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

    async def take(
        self, remaining_s: float, owner: str = "", work: Sequence[int] = (1,), model: str = ""
    ) -> "Slot":
        """Wait for a slot and take it.

        Args:
            remaining_s, owner: as those of `check`.
            work: units of each image or tensor.
            model: its model, whose requests take about the same time.

        Raises:
            Failure: as `check`; `deadline_exceeded` if no slot became free in time.
        """
        self.check(remaining_s, owner)
        slot, deadline_s = Slot(self, owner, model, sum(work)), self._clock() + remaining_s
        try:
            if owner and max(work) < LARGE_WORK:
                await slot.wait(self._own_turns(owner, model), "", remaining_s)
            if max(work) >= LARGE_WORK or (owner and self.costs.is_costly(owner, model)):
                self._check_large(owner)
                slot.is_large = True
                await slot.wait(self._large, owner, max(0.0, deadline_s - self._clock()))
            await slot.wait(self._turns, owner, max(0.0, deadline_s - self._clock()))
        except BaseException as error:
            slot.release()
            if not isinstance(error, TimeoutError):
                raise
            text = f"no slot became free within {remaining_s:.3g} s"
            raise Failure("deadline_exceeded", text) from None
        slot.begin()
        return slot

    def _check_large(self, owner: str) -> None:
        if (waiting := self._large.waiting_of(owner)) >= MAX_LARGE_WAITING:
            raise Failure(
                "overloaded",
                f"{waiting} large images of this key are in the queue; retry later",
                self.retry_after_s(),
            )

    def _own_turns(self, owner: str, model: str) -> Turns:
        if (owner, model) not in self._own:
            limit = partial(self.costs.most_in_flight, owner, model)
            self._own[owner, model] = Turns(limit, self._clock)
        return self._own[owner, model]

    def forget(self, owner: str, model: str) -> None:
        """Forget the turns of a key and a model that has no requests."""
        turns = self._own.get((owner, model))
        if turns and not turns.taken and not turns.waiting:
            del self._own[owner, model]

    def retry_after_s(self) -> float:
        """Return the estimated time for the requests in flight and in the queue, at the recent speed."""
        return min(MAX_RETRY_AFTER_S, self._needed_s(self.in_flight / self.limit, self.waiting))

    def _needed_s(self, round_trips: float, waiting: int) -> float:
        """Return the duration of a queue and of a number of further round trips."""
        return self._concurrency_limit.rtt_s * (round_trips + waiting / self.limit)


class Slot:
    """A slot of one request in flight; released exactly once.

    Attributes:
        is_large: whether it is in the lane of large images.
    """

    __slots__ = ("_admission", "_began_s", "_in_flight", "_model", "_owner", "_turns", "_work", "is_large")

    def __init__(self, admission: Admission, owner: str, model: str, work: int) -> None:
        self._admission, self._owner, self._model, self._work = admission, owner, model, work
        self._began_s, self._in_flight = inf, 1
        self._turns: list[tuple[Turns, str]] = []
        self.is_large = False

    async def wait(self, turns: Turns, owner: str, remaining_s: float) -> None:
        """Wait for a turn, which the slot then has."""
        await turns.take(owner, remaining_s)
        self._turns.append((turns, owner))

    def begin(self) -> None:
        """Note that the request is in flight from now on."""
        self._began_s, self._in_flight = self._admission._clock(), self._admission.in_flight

    def measure(self, is_answered: bool) -> int:
        """Record the time in flight of a request; return the units that it cost beyond the declared ones."""
        if not (owner := self._owner):
            return 0
        costs = self._admission.costs
        seconds = self._in_flight_s()
        return costs.note(owner, self._model, seconds, self._work, self._in_flight, is_answered)

    def answered(self) -> None:
        """Release the slot after a correct response, and record its round trip unless the image is large."""
        admission, now_s = self._admission, self._admission._clock()
        if not self.is_large and self._work == 1:
            admission._concurrency_limit.sample(now_s - self._began_s, admission.in_flight - 1, now_s)
        self.release()

    def rejected(self) -> None:
        """Release the slot after the server reported overload, and lower the limit."""
        self._admission._concurrency_limit.dropped()
        self.release()

    def release(self) -> None:
        """Release the slot without a sample, also one that is only waited for."""
        while self._turns:
            turns, owner = self._turns.pop()
            turns.leave(owner, self._in_flight_s())
        if self._owner:
            self._admission.forget(self._owner, self._model)

    def rest_s(self) -> float:
        """Return the estimated time that the server still works on a request whose caller has left.

        The server finishes a dispatched request without a report. The mean time of its key is assumed, for
        each unit that it declared; for a large image four times as much. It is `PATIENCE_S` for a key whose
        requests are limited.
        """
        admission, costs = self._admission, self._admission.costs
        each_s = max(admission._concurrency_limit.rtt_s, costs.expected_s(self._owner, self._model))
        whole_s = each_s * self._work * (LARGE_MARGIN if self.is_large else 1)
        if self.is_large or costs.most_in_flight(self._owner, self._model) < sys.maxsize:
            whole_s = max(whole_s, PATIENCE_S)
        return max(0.0, min(whole_s, MAX_REST_S) - self._in_flight_s())

    def _in_flight_s(self) -> float:
        return max(0.0, self._admission._clock() - self._began_s)

"""A limited number of turns at a time; those who wait get theirs by the time that their owner has used."""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from math import inf

from nereid.gateway.admission.costs import MEMORY_S


class Turns:
    """Turns that many owners share: each gets the same time, however long its queue or its turns are.

    The next turn goes to the owner that has used the least time, which counts from the moment when it joins
    the others. An owner leaves one turn to the others, if any was there in the last `MEMORY_S` seconds.
    Without a name it may take all.

    Source: start-time fair queueing (Goyal, Vin and Cheng 1996); the time of a turn is known when it ends.

    Args:
        limit: returns how many turns there may be at a time.
        clock: monotonic time in seconds.
    """

    def __init__(self, limit: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        # The owner that was there last, and when; and when any other was.
        self._newest, self._newest_s, self._others_s = "", -inf, -inf
        # The owner that got a turn last is the last.
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        self._held = Counter[str]()
        self._used_s = defaultdict[str, float](float)
        self._last_s = defaultdict[str, float](float)
        self._now_s = 0.0
        self.taken = 0

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return sum(map(len, self._queues.values()))

    def waiting_before(self, owner: str) -> int:
        """Return how many of those that wait get their turn before another request of an owner, about."""
        own = self.waiting_of(owner)
        return sum(min(len(queue), own + (name != owner)) for name, queue in self._queues.items())

    def waiting_of(self, owner: str) -> int:
        """Return how many requests of an owner wait."""
        return len(self._queues.get(owner, ()))

    async def take(self, owner: str, remaining_s: float | None = None) -> None:
        """Wait for a turn and take it; `leave` ends it.

        Raises:
            TimeoutError: there was no turn in time.
        """
        if owner != self._newest:
            self._newest, self._others_s = owner, self._newest_s
        self._newest_s = self._clock()
        if owner not in self._queues and not self._held[owner]:
            self._used_s[owner] = max(self._used_s[owner], self._now_s)
        if not self._queues and self._may_take(owner, self._limit()):
            self._begin(owner)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(owner, deque()).append(turn)
        self._give()
        try:
            async with asyncio.timeout(None if turn.done() else remaining_s):
                await turn
        except BaseException:
            self._give_up(owner, turn)
            raise

    def leave(self, owner: str, seconds: float = 0.0) -> None:
        """End a turn of an owner that took this time, and give it to the next one who waits."""
        self.taken -= 1
        self._held[owner] -= 1
        self._used_s[owner] += seconds
        self._last_s[owner] = seconds
        self._forget(owner)
        if self._queues:
            self._give()

    def _give(self) -> None:
        while (owner := self._next()) is not None:
            queue = self._queues.pop(owner)
            turn = queue.popleft()
            if queue:
                self._queues[owner] = queue
            if not turn.done():
                self._begin(owner)
                turn.set_result(None)

    def _begin(self, owner: str) -> None:
        self.taken += 1
        self._held[owner] += 1
        self._now_s = max(self._now_s, self._used_s[owner])

    def _may_take(self, owner: str, limit: int) -> bool:
        """Return whether there is a turn for an owner, which leaves one to others if there are any."""
        held = self._held[owner]
        return self.taken < limit and (not owner or held < max(1, limit - 1) or self._is_alone(owner))

    def _is_alone(self, owner: str) -> bool:
        others_s = self._others_s if owner == self._newest else self._newest_s
        has_others = self.taken > self._held[owner] or self._queues.keys() - {owner}
        return not has_others and self._clock() - others_s > MEMORY_S

    def _next(self) -> str | None:
        """Return the owner whose turn it is: turns that it still has count as long as its last one."""
        limit = self._limit()
        able = (owner for owner in self._queues if self._may_take(owner, limit))
        return min(able, key=self._tag_s, default=None)

    def _tag_s(self, owner: str) -> float:
        return self._used_s[owner] + self._held[owner] * self._last_s[owner]

    def _give_up(self, owner: str, turn: "asyncio.Future[None]") -> None:
        queue = self._queues.get(owner, deque())
        if turn in queue:
            queue.remove(turn)
            if not queue:
                del self._queues[owner]
            self._forget(owner)
        elif not turn.cancelled():  # a turn was given in the same moment
            self.leave(owner)

    def _forget(self, owner: str) -> None:
        """Forget an owner that has no turn, waits for none, and has used no more than others."""
        if not self._held[owner] and owner not in self._queues and self._used_s[owner] <= self._now_s:
            for each in (self._held, self._used_s, self._last_s):
                each.pop(owner, None)

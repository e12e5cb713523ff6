"""A limited number of turns at a time; those who wait get theirs in turn by owner."""

import asyncio
from collections import deque
from collections.abc import Callable


class Turns:
    """Turns that many owners share: one owner's long queue does not delay the first request of another.

    Args:
        limit: returns how many turns there may be at a time.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        # The owner at the front gets the next turn, and then goes to the back.
        self._queues: dict[str, deque[asyncio.Future[None]]] = {}
        self.taken = 0

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return sum(map(len, self._queues.values()))

    def waiting_before(self, owner: str) -> int:
        """Return how many of those that wait get their turn before another request of an owner."""
        own = self.waiting_of(owner)
        return sum(min(len(queue), own + (name != owner)) for name, queue in self._queues.items())

    def waiting_of(self, owner: str) -> int:
        """Return how many requests of an owner wait."""
        return len(self._queues.get(owner, ()))

    async def take(self, owner: str, remaining_s: float) -> None:
        """Wait for a turn and take it; `leave` ends it.

        Raises:
            TimeoutError: there was no turn in time.
        """
        if self.taken < self._limit() and not self._queues:
            self.taken += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(owner, deque()).append(turn)
        try:
            async with asyncio.timeout(remaining_s):
                await turn
        except BaseException:
            self._give_up(owner, turn)
            raise

    def leave(self) -> None:
        """End a turn, and give it to the next one who waits."""
        self.taken -= 1
        while self._queues and self.taken < self._limit():
            owner, queue = next(iter(self._queues.items()))
            turn = queue.popleft()
            del self._queues[owner]
            if queue:
                self._queues[owner] = queue
            if not turn.done():
                self.taken += 1
                turn.set_result(None)

    def _give_up(self, owner: str, turn: "asyncio.Future[None]") -> None:
        queue = self._queues.get(owner, deque())
        if turn in queue:
            queue.remove(turn)
            if not queue:
                del self._queues[owner]
        elif not turn.cancelled():  # a turn was given in the same moment
            self.leave()

"""A call whose result several requests share, and which is not repeated for a while."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class CachedCall(Generic[Value]):
    """A call without arguments, of which at most one is in progress.

    Args:
        call: starts the call.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, call: Callable[[], Awaitable[Value]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._call, self._clock = call, clock
        self._task: asyncio.Task[Value] | None = None
        self._ended_at = 0.0

    def task(self, max_age_s: float) -> "asyncio.Task[Value]":
        """Return the call in progress, or one that ended less than `max_age_s` seconds ago, or a new one.

        Its callers share it: they must not cancel it.
        """
        task = self._task
        if task is None or (task.done() and self._clock() - self._ended_at >= max_age_s):
            task = self._task = asyncio.create_task(self._run())
        return task

    def forget(self) -> None:
        """Forget the last call, because its result has changed."""
        self._task = None

    async def _run(self) -> Value:
        try:
            return await self._call()
        finally:
            self._ended_at = self._clock()

"""Gateway readiness: ready if the server behind it responds to an image."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from msgspec import Struct

from nereid.base.assets import COFFEE
from nereid.gateway.failures import Failure

MAX_CACHE_AGE_S, PROBE_TIMEOUT_S = 2.0, 5.0
# Maximum age in seconds of a result shown on an open page.
MAX_WATCHED_AGE_S = 5.0


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


class Health(Struct):
    """Liveness of the process."""

    live: bool


class Ready(Struct):
    """Readiness, with a reason if not ready."""

    ready: bool
    reason: str = ""


class ReadinessProbe:
    """Probe the server with a real inference, at most one at a time and every `MAX_CACHE_AGE_S` seconds.

    Args:
        infer: sends an image to the model with a time limit; bypasses admission so that load does not count
            as a failure.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, infer: Callable[..., Awaitable[Any]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._infer, self._probing = infer, CachedCall(self._probe, clock)
        self._image = COFFEE.read_bytes()
        self._result: Ready | None = None

    async def state(self) -> Ready:
        """Return the last result or probe again; concurrent callers share one probe."""
        return await asyncio.shield(self._probing.task(MAX_CACHE_AGE_S))

    def latest(self) -> Ready | None:
        """Return the last result without waiting, or None; if it is old, start a new probe."""
        self._probing.task(MAX_WATCHED_AGE_S)
        return self._result

    async def _probe(self) -> Ready:
        result = Ready(True)
        try:
            await self._infer(self._image, PROBE_TIMEOUT_S)
        except TimeoutError:
            result = Ready(False, f"no response within {PROBE_TIMEOUT_S:.3g} s")
        except Failure as failure:
            # Overload does not count: moving the load to the next server would overload that one.
            if failure.code != "overloaded":
                result = Ready(False, failure.message)
        self._result = result
        return result

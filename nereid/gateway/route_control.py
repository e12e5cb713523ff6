"""The interface through which the gateway shows and changes a route."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from msgspec import Struct


class VariantState(Struct, frozen=True):
    """One variant: `version` of its model, `share` 0 to 1, `breaker` empty before the first request."""

    name: str
    model: str
    version: str
    weight: float
    share: float
    breaker: str


RolloutCommand = Literal["start", "pause", "resume", "promote", "abort"]


class RolloutState(Struct, frozen=True):
    """The newest rollout of a route.

    Attributes:
        number: sequence number of the rollout within its route.
        candidate: the variant whose traffic is being increased.
        phase: `stepping`, `measuring`, `paused`, `withdrawing` or `ended`.
        orders: the orders allowed in this phase.
        text: the state in words.
    """

    number: int
    candidate: str
    phase: str
    orders: list[str]
    text: str


class RouteState(Struct, frozen=True):
    """A route file; `detail` describes the state of the server."""

    model: str
    generation: int
    default: str
    is_served: bool
    detail: str
    variants: list[VariantState]
    rollout: RolloutState | None = None


class RouteControl(Protocol):
    """A route that can be shown and changed; its methods block and raise `nereid.gateway.failures.Failure`.

    The code is `conflict` if the route has changed or a rollout is active, `invalid_request` if the change
    does not fit the route, and `unavailable` otherwise.
    """

    def show(self) -> RouteState:
        """Return the current route."""

    def set_weights(self, weights: Mapping[str, float], generation: int | None, author: str) -> RouteState:
        """Change the weights of variants.

        Args:
            weights: new weight by variant; other variants keep theirs.
            generation: generation that the route must still have; None for any.
            author: recorded as the author of the change.
        """

    def issue_rollout_command(
        self, command: RolloutCommand, candidate: str, steps: Sequence[str | float], author: str
    ) -> RouteState:
        """Start a rollout, or give a command to the active one.

        Args:
            command: what to do.
            candidate, steps: for a rollout to start; empty steps mean the default ones.
            author: recorded as the author of the command.
        """


class RouteView:
    """A route with many readers: blocking calls run in a thread, and results are cached for one second."""

    MAX_CACHE_AGE_S = 1.0

    def __init__(self, control: RouteControl, clock: Callable[[], float] = time.monotonic) -> None:
        self.control, self._clock = control, clock
        self._reading: asyncio.Task[RouteState] | None = None
        self._read_at = 0.0

    async def show(self) -> RouteState:
        """Return the route; concurrent callers share one read."""
        reading = self._reading
        if reading is None or (reading.done() and self._clock() - self._read_at >= self.MAX_CACHE_AGE_S):
            reading = self._reading = asyncio.create_task(self._read())
        return await asyncio.shield(reading)

    async def change(self, change: Callable[[], RouteState]) -> RouteState:
        """Call a method of `control` that changes the route, with its arguments, and return the new route."""
        state = await asyncio.to_thread(change)
        self._reading = None
        return state

    async def _read(self) -> RouteState:
        try:
            return await asyncio.to_thread(self.control.show)
        finally:
            self._read_at = self._clock()

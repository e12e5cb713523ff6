"""What the gateway shows and changes of a route; whoever starts it brings the hands for that."""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct


class VariantState(Struct, frozen=True):
    """One variant: `version` is its network's, `share` 0 to 1, `breaker` empty while it was never asked."""

    name: str
    model: str
    version: str
    weight: float
    share: float
    breaker: str


class RouteState(Struct, frozen=True):
    """A route as its file has it; `detail` says what the server makes of it."""

    model: str
    generation: int
    default: str
    is_served: bool
    detail: str
    variants: list[VariantState]


class RouteConflict(Exception):
    """The route has changed since the caller looked."""


class RouteRefused(Exception):
    """The change is wrong; the message says what was expected and what came."""


class RouteFailed(Exception):
    """The route cannot be read or written, or the server does not take it."""


class RouteControl(Protocol):
    """A route that can be shown and changed; its methods block."""

    def show(self) -> RouteState:
        """Return the route as it is.

        Raises:
            RouteFailed: it cannot be read.
        """

    def set_weights(self, weights: Mapping[str, float], generation: int | None, who: str) -> RouteState:
        """Give variants new weights.

        Args:
            weights: by variant; others keep theirs.
            generation: which the route must still have; None for any.
            who: whose change it is.

        Raises:
            RouteConflict, RouteRefused, RouteFailed: it was not changed, or is not served.
        """


class RouteView:
    """A route as many may look at it: what blocks runs in a thread, and an answer is good for a second."""

    FRESH_S = 1.0

    def __init__(self, control: RouteControl, clock: Callable[[], float] = time.monotonic) -> None:
        self._control, self._clock = control, clock
        self._looking: asyncio.Task[RouteState] | None = None
        self._looked_s = 0.0

    async def show(self) -> RouteState:
        """Return the route; all who ask at once share one look."""
        looking = self._looking
        if looking is None or (looking.done() and self._clock() - self._looked_s >= self.FRESH_S):
            looking = self._looking = asyncio.create_task(self._look())
        return await asyncio.shield(looking)

    async def set_weights(self, weights: Mapping[str, float], generation: int | None, who: str) -> RouteState:
        """Change weights; raises what `RouteControl.set_weights` does."""
        state = await asyncio.to_thread(self._control.set_weights, weights, generation, who)
        self._looking = None
        return state

    async def _look(self) -> RouteState:
        try:
            return await asyncio.to_thread(self._control.show)
        finally:
            self._looked_s = self._clock()

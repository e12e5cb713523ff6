"""The interface through which the gateway shows and changes a route."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

from msgspec import Struct

from nereid.gateway.readiness import CachedCall


class VariantState(Struct, frozen=True):
    """One variant: `version` of its model, `share` 0 to 1, `breaker` empty before the first request."""

    name: str
    model: str
    version: str
    weight: float
    share: float
    breaker: str


RolloutOrder = Literal["start", "pause", "resume", "promote", "abort"]


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


class Weights(Struct, forbid_unknown_fields=True):
    """New weights by variant; a generation makes the change conditional."""

    weights: dict[str, float]
    generation: int | None = None


class RolloutChange(Struct, forbid_unknown_fields=True):
    """An order for a rollout; `candidate` and `steps` apply only to `start`."""

    order: RolloutOrder
    candidate: str = ""
    steps: list[str | float] = []


class RouteControl(Protocol):
    """A route that can be shown and changed; its methods block and raise `nereid.gateway.failures.Failure`.

    The code is `conflict` if the route has changed or a rollout is active, `invalid_request` if the change
    does not fit the route, and `unavailable` otherwise.
    """

    def show(self) -> RouteState:
        """Return the current route."""

    def set_weights(self, wanted: Weights, author: str) -> RouteState:
        """Change the weights of some variants, and record the author; the others keep theirs."""

    def order_rollout(self, wanted: RolloutChange, author: str) -> RouteState:
        """Start a rollout, or give an order to the active one, and record the author."""


class RouteView:
    """A route with many readers: blocking calls run in a thread, and results are cached for one second."""

    MAX_CACHE_AGE_S = 1.0

    def __init__(self, control: RouteControl, clock: Callable[[], float] = time.monotonic) -> None:
        self.control = control
        self._reading = CachedCall(partial(asyncio.to_thread, control.show), clock)

    async def show(self) -> RouteState:
        """Return the route; concurrent callers share one read."""
        return await asyncio.shield(self._reading.task(self.MAX_CACHE_AGE_S))

    async def change(self, method: Callable[..., RouteState], *arguments: Any) -> RouteState:
        """Call a method of `control` that changes the route, and return the new route."""
        state = await asyncio.to_thread(method, *arguments)
        self._reading.forget()
        return state

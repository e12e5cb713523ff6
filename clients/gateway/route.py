"""What the gateway shows and changes of a route; whoever starts it brings the hands for that."""

from collections.abc import Mapping
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

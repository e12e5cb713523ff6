"""What the router needs of the world: a request to pass on, and a place to count."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from nereid.serving_errors import ServingError

# A model with so many calls that are past their deadline and have not come back gets no further ones: each
# holds a thread, of the server too.
MOST_LATE = 8


class Exchange(Protocol):
    """One request; `timeout_s` is how long its caller waits, 0 for no limit."""

    timeout_s: float

    def parameters(self) -> Mapping[str, Any]:
        """Return the request's parameters; raises InvalidRequest."""

    def is_cancelled(self) -> bool:
        """Tell whether the client has left."""

    def call(self, model: str, version: int, timeout_s: float) -> Any:
        """Send the request on and return the response; raises ServingError."""

    def scores(self, response: Any) -> np.ndarray:
        """Return a response's first output, [N, …]."""

    def answer(self, response: Any, variant: str, version: str, reason: str) -> None:
        """Answer with the response, and with who gave it and why."""

    def refuse(self, error: ServingError) -> None:
        """Answer with an error."""


class Counts(Protocol):
    """Where is counted what `metrics.ROUTE_METRICS` names."""

    def add(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Count, or observe in a histogram."""

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Give a gauge a value."""


class BoundedLabels:
    """Names that become labels of a metric: beyond `MOST` of them, further ones are `other`.

    A route may change as often as it likes, but a series stays as long as its server.
    """

    MOST = 64

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def __call__(self, *names: str) -> tuple[str, ...]:
        """Return the labels for `names`, which belong together."""
        if names not in self._known and len(self._known) >= self.MOST:
            return ("other",) * len(names)
        self._known.add(names)
        return names

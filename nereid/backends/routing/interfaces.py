"""Interfaces of the router to its host: the requests it forwards, and the metrics it writes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from nereid.base.serving_errors import ServingError

# A model with this many attempts past their deadline that have not returned gets no further ones: each
# occupies a thread, of the server too.
MAX_LATE = 8
NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})


class RoutedRequest(Protocol):
    """One request; `timeout_s` is how long its client waits, 0 for no limit."""

    timeout_s: float

    def check(self) -> None:
        """Check what every variant would reject; raises InvalidRequest."""

    def parameters(self) -> Mapping[str, Any]:
        """Return the request's parameters; raises InvalidRequest."""

    def is_cancelled(self) -> bool:
        """Return whether the client has disconnected."""

    def is_large(self) -> bool:
        """Return whether an image is so large that its request may take long; reads all of them."""

    def forward(
        self, model: str, version: int, timeout_s: float, parameters: Mapping[str, Any] = NO_PARAMETERS
    ) -> Any:
        """Send the request to a model, with parameters, and return the response; raises ServingError."""

    def arrays(self, response: Any, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Return outputs of a response, each [N, …], by name."""

    def respond(self, response: Any, variant: str, version: str, reason: str) -> None:
        """Send the response to the client, with the variant, its version and the reason for it."""

    def answer(self, rows: Mapping[str, np.ndarray]) -> None:
        """Send the configured answer to the client: for each image, a row of each output."""

    def reject(self, error: ServingError) -> None:
        """Send an error to the client."""


class MetricSink(Protocol):
    """Receiver of the metrics that `metrics.ROUTE_METRICS` names."""

    def add(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Increment a counter, or observe a value in a histogram."""

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set the value of a gauge."""


class BoundedLabels:
    """Label values of a metric: after `LIMIT` of them, further ones are `other`.

    A route may change without limit, but a series stays as long as its server.
    """

    LIMIT = 64

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def __call__(self, *names: str) -> tuple[str, ...]:
        """Return the labels for `names`, which belong together."""
        if names not in self._known and len(self._known) >= self.LIMIT:
            return ("other",) * len(names)
        self._known.add(names)
        return names

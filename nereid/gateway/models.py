"""The models that a gateway offers: connection, readiness, last minute and route of each."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Unpack

from nereid.client.prediction import Prediction
from nereid.client.request import Options
from nereid.gateway.failures import Failure
from nereid.gateway.live import Live
from nereid.gateway.readiness import Readiness
from nereid.gateway.route_control import RouteControl, RouteView

# Names in an error message; a repository may have hundreds.
MAX_NAMES = 20


class Upstream(Protocol):
    """The classifier behind the gateway, usually a `nereid.AsyncClassifier`."""

    async def classify(self, image: bytes, **options: Unpack[Options]) -> Prediction:
        """Classify one image."""

    async def close(self) -> None:
        """Close all connections to the server."""


class PreviewRefused(Exception):
    """An image cannot be shown as the network sees it; the message says why."""


class ModelSource(Protocol):
    """The names of the models behind a gateway, which may change; its methods block."""

    def names(self) -> Sequence[str]:
        """Return the names of the models that the gateway offers now."""

    def route(self, name: str) -> RouteControl | None:
        """Return the control of a route, or None if it cannot be shown and changed here."""

    def preview(self, name: str, image: bytes) -> bytes | None:
        """Return an image as a model's network sees it (PNG), or None if the preprocessing is not known.

        Raises:
            PreviewRefused: it is not an image, or damaged.
        """


@dataclass(frozen=True, slots=True)
class FixedModels:
    """Models with fixed names, whose routes cannot be changed; for a server elsewhere."""

    fixed: tuple[str, ...]

    def names(self) -> Sequence[str]:
        """Return the fixed names."""
        return self.fixed

    def route(self, name: str) -> RouteControl | None:
        """Return None."""
        return None

    def preview(self, name: str, image: bytes) -> bytes | None:
        """Return None."""
        return None


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """One model that the gateway offers."""

    name: str
    upstream: Upstream
    live: Live
    readiness: Readiness
    route: RouteView | None


class Models:
    """All models of one gateway; a model is connected to when a request names it first.

    Args:
        default: name of the model that answers requests without a name.
        source: names and routes of the models.
        connect: returns the classifier of a model.
    """

    def __init__(self, default: str, source: ModelSource, connect: Callable[[str], Upstream]) -> None:
        self._source, self._connect = source, connect
        self.known: dict[str, OfferedModel] = {}
        self.default = self._add(default)

    async def find(self, name: str) -> OfferedModel:
        """Return a model by its name.

        Raises:
            Failure: no model has that name; the message has the names that exist.
        """
        if name in self.known:
            return self.known[name]
        names = await self.names()
        if name not in names:
            listed = ", ".join(names[:MAX_NAMES]) + (", …" if names[MAX_NAMES:] else "")
            raise Failure("not_found", f"unknown model {name[:128]!r}; expected one of: {listed}")
        return self.known.get(name) or self._add(name)

    def preview(self, name: str, image: bytes) -> bytes | None:
        """Return an image as a model's network sees it; blocks, see `ModelSource.preview`."""
        return self._source.preview(name, image)

    async def names(self) -> list[str]:
        """Return the names of all models, the default one first."""
        found = await asyncio.to_thread(self._source.names)
        return [self.default.name, *(name for name in found if name != self.default.name)]

    async def close(self) -> None:
        """Close the connections of all models."""
        for model in self.known.values():
            await model.upstream.close()

    def _add(self, name: str) -> OfferedModel:
        upstream, route = self._connect(name), self._source.route(name)
        view = RouteView(route) if route else None
        model = self.known[name] = OfferedModel(name, upstream, Live(), Readiness(upstream.classify), view)
        return model

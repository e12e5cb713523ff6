"""Gateways for tests: an upstream that answers what it is told, and requests without a network."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx

from clients.gateway.app import app_of
from clients.gateway.gateway import build
from clients.gateway.route import RouteState, VariantState
from clients.gateway.settings import Settings
from clients.prediction import Label, Prediction, Timings

LOCAL = "http://127.0.0.1"
LABELS = (Label(967, "espresso", 0.9), Label(968, "cup", 0.1))
PREDICTION = Prediction(LABELS, "classify", "1", "v1", "weight", "id", Timings(0, 1))
ROUTE = RouteState(
    "classify", 3, "v1", True, "", [VariantState("v1", "classify_v1", "1", 1.0, 1.0, "closed")]
)
# Smaller than what the sample photos need, so that limits are met.
SMALL = Settings(
    max_body_bytes=1000, max_buffered_bytes=3000, max_pixels=10_000, max_side_px=500, max_images=3
)


class Upstream:
    """Answers with `outcome`, or raises it; holds every call while `gate` is closed."""

    def __init__(self, outcome: Any = PREDICTION) -> None:
        self.outcome = outcome
        self.asked: list[tuple[bytes, dict[str, Any]]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.cancelled = 0

    async def classify(self, image: bytes, **options: Any) -> Prediction:
        """Answer as `AsyncClassifier.classify` does."""
        self.asked.append((image, options))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Key:
    """A key as `clients.gateway.keys` has them."""

    id: str
    name: str
    scopes: frozenset[str]
    rate_per_s: float | None = None


@dataclass
class Ring:
    """Keys by their secrets."""

    keys: dict[str, Key] = field(default_factory=dict)

    def find(self, secret: str) -> Key | None:
        """Return the key with this secret."""
        return self.keys.get(secret)


RING = Ring({each: Key(f"id-{each}", each, frozenset({each})) for each in ("infer", "route", "admin")})


def gateway(upstream: Upstream, settings: Settings = SMALL, keys: Any = None, route: Any = None) -> Any:
    """Return a gateway in front of `upstream`."""
    return build(settings, keys, route, upstream)


def ask(made: Any, method: str, path: str, page: Any = None, **request: Any) -> httpx.Response:
    """Send one request to a gateway, and wait for the answer."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(made, page))
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            return await client.request(method, path, **request)

    return asyncio.run(run())

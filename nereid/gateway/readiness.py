"""Whether the gateway is of use: it is if the server behind it classifies an image."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct

from nereid.assets import COFFEE
from nereid.client.classifier_errors import ClassifierError, Overloaded
from nereid.gateway.failures import from_classifier
from nereid.gateway.http.tracing import new_request_id

FRESH_S, TIMEOUT_S = 2.0, 5.0


class Health(Struct):
    """Whether the process lives."""

    live: bool


class Ready(Struct):
    """Whether requests will be answered; if not, why."""

    ready: bool
    reason: str = ""


class Readiness:
    """Asks the server for a real inference, at most one at a time and every `FRESH_S` seconds.

    Args:
        classify: as `AsyncClassifier.classify`; asked outside of admission, so that load is no failure.
        clock: seconds that never jump.
    """

    def __init__(
        self, classify: Callable[..., Awaitable[Any]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._classify, self._clock = classify, clock
        self._image = COFFEE.read_bytes()
        self._asking: asyncio.Task[Ready] | None = None
        self._asked_s = 0.0

    async def ask(self) -> Ready:
        """Return the last answer, or a new one; all who ask at once get the same."""
        asking = self._asking
        if asking is None or (asking.done() and self._clock() - self._asked_s >= FRESH_S):
            asking = self._asking = asyncio.create_task(self._probe())
        return await asyncio.shield(asking)

    async def _probe(self) -> Ready:
        try:
            await self._classify(
                self._image, top_k=1, timeout_s=TIMEOUT_S, request_id=f"readyz-{new_request_id()}"
            )
        except Overloaded:  # whoever sent the requests elsewhere would overload the next
            return Ready(True)
        except ClassifierError as error:
            return Ready(False, from_classifier(error, TIMEOUT_S, 1.0).message)
        finally:
            self._asked_s = self._clock()
        return Ready(True)

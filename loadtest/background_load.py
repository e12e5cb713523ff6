"""A closed loop of classifiers in the background, over HTTP and gRPC, with the outcome of each request."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from nereid.assets import COFFEE
from nereid.client.async_classifier import AsyncClassifier
from nereid.client.classifier_errors import ClassifierError
from nereid.client.prediction import Prediction
from nereid.client.request import ProtocolName
from nereid.tune.load_generator import Send, send_repeatedly

PROTOCOLS: tuple[ProtocolName, ...] = ("http", "grpc")


class Server(Protocol):
    """A server with an address for each protocol."""

    def url(self, protocol: ProtocolName) -> str:
        """Return HOST:PORT."""


@dataclass(frozen=True, slots=True)
class Request:
    """Begin and end of a request (monotonic seconds), and its failure; empty for a correct response."""

    begin_s: float
    end_s: float
    failure: str


class BackgroundLoad:
    """Sends requests while the context lasts; each caller has its own connection.

    Args:
        server: a running server.
        model: the model that classifies.
        count: of callers; every other one uses gRPC.
        pause_s: between a response and the caller's next request.
        timeout_s: of one request.
        check: returns the fault of a response, empty for a correct one.
        api_key: the key that a guarded server expects; "" for none.
    """

    def __init__(
        self,
        server: Server,
        model: str,
        count: int,
        pause_s: float = 0.0,
        timeout_s: float = 30.0,
        check: Callable[[Prediction], str] = lambda prediction: "",
        api_key: str = "",
    ) -> None:
        self.requests: list[Request] = []
        self._server, self._model, self._count = server, model, count
        self._pause_s, self._timeout_s, self._check = pause_s, timeout_s, check
        self._api_key = api_key
        self._photo = COFFEE.read_bytes()
        self._over = threading.Event()
        self._failures: list[BaseException] = []
        self._begins_s: dict[int, float] = {}
        self._thread = threading.Thread(target=self._run, name="background load")

    def __enter__(self) -> "BackgroundLoad":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failures and not any(raised):
            raise self._failures[0]

    def waits_since_s(self) -> float:
        """Return the begin of the oldest request in flight, or now."""
        return min([*self._begins_s.values(), time.monotonic()])

    def _run(self) -> None:
        try:
            asyncio.run(self._send_all())
        except BaseException as error:  # raised in the main thread, at the end of the context
            self._failures.append(error)

    async def _send_all(self) -> None:
        await asyncio.gather(*(self._send(number, PROTOCOLS[number % 2]) for number in range(self._count)))

    async def _send(self, caller: int, protocol: ProtocolName) -> None:
        @asynccontextmanager
        async def opened() -> AsyncIterator[Send[str]]:
            # A new connection after each failure: gRPC reconnects an old one only after seconds.
            url = self._server.url(protocol)
            async with AsyncClassifier(
                url, protocol, self._model, self._timeout_s, api_key=self._api_key
            ) as classifier:
                yield lambda: self._classify(caller, classifier)

        await send_repeatedly(
            opened,
            self._over.is_set,
            lambda begin_s, end_s, failure: self.requests.append(Request(begin_s, end_s, failure)),
            self._pause_s,
        )

    async def _classify(self, caller: int, classifier: AsyncClassifier) -> tuple[str, bool]:
        self._begins_s[caller] = time.monotonic()
        try:
            failure = self._check(await classifier.classify(self._photo, top_k=1))
        except ClassifierError as error:
            failure = str(error) or type(error).__name__
        finally:
            del self._begins_s[caller]
        return failure, not failure

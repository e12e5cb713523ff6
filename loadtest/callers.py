"""Callers that ask a model one request after the other, over HTTP and gRPC, and keep what became of each."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from nereid.assets import COFFEE
from nereid.client.classifier import Classifier
from nereid.client.errors import ClassifierError
from nereid.client.prediction import Prediction
from nereid.client.request import ProtocolName
from nereid.server.run_dir import ServerRecord

PROTOCOLS: tuple[ProtocolName, ...] = ("http", "grpc")


@dataclass(frozen=True, slots=True)
class Request:
    """When a request was sent and ended (monotonic seconds), and what was wrong with it, if anything."""

    begin_s: float
    end_s: float
    failure: str


class Callers:
    """Ask a model for as long as the context lasts, each caller on its own connection.

    Args:
        server: a running one.
        model: what they ask.
        count: of callers; every other one uses gRPC.
        pause_s: between an answer and the caller's next request.
        timeout_s: a caller's patience with one request.
        check: tells what is wrong with an answer; nothing if it is right.
    """

    def __init__(
        self,
        server: ServerRecord,
        model: str,
        count: int,
        pause_s: float = 0.0,
        timeout_s: float = 30.0,
        check: Callable[[Prediction], str] = lambda prediction: "",
    ) -> None:
        self.requests: list[Request] = []
        self._server, self._model = server, model
        self._pause_s, self._timeout_s, self._check = pause_s, timeout_s, check
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._call, args=[PROTOCOLS[number % 2]]) for number in range(count)
        ]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _call(self, protocol: ProtocolName) -> None:
        photo, url = COFFEE.read_bytes(), self._server.url(protocol)
        while not self._over.is_set():
            # A new connection after each failure: an old one of gRPC waits for seconds before it tries again.
            with Classifier(url, protocol, self._model, self._timeout_s) as classifier:
                while not self._over.is_set() and not self._ask(classifier, photo):
                    pass

    def _ask(self, classifier: Classifier, photo: bytes) -> str:
        begin_s = time.monotonic()
        try:
            failure = self._check(classifier.classify(photo, top_k=1))
        except ClassifierError as error:
            failure = str(error) or type(error).__name__
        self.requests.append(Request(begin_s, time.monotonic(), failure))
        self._over.wait(self._pause_s)
        return failure

"""Requests of many kinds, each at its own rate from a thread of its own, and their outcomes.

A request has a right outcome, a wrong one, or it failed: no answer came, or the server could not give one. A
wrong outcome is never allowed, a failure only around a fault.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from nereid.base.assets import COFFEE
from nereid.client.client_errors import RequestRefused
from nereid.client.request import ProtocolName
from nereid.tasks.classify.client import Classifier
from nereid.tasks.classify.result import Prediction

# The limit on requests in flight at the end; all timeouts of callers are shorter.
JOIN_S = 60.0
POLL_S = 0.1
PROTOCOLS: tuple[ProtocolName, ...] = ("http", "grpc")

# Begin and end of a request in monotonic seconds.
Span = tuple[float, float]


class Failed(Exception):
    """The server answered that it cannot answer now."""


@dataclass(slots=True)
class Target:
    """The addresses of server and gateway, each as HOST:PORT; a new gateway has another one."""

    http: str
    grpc: str
    gateway: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request: its rate, a client for the duration of a context, and what to send.

    `send` returns the fault of a wrong outcome, empty for none, and raises if the request failed.
    """

    name: str
    per_s: float
    opened: Callable[[Target], AbstractContextManager[Any]]
    send: Callable[[Any], str]


class Failure(NamedTuple):
    """A failed request: its end and begin in monotonic seconds, and the reason."""

    end_s: float
    begin_s: float
    text: str


@dataclass(slots=True)
class Tally:
    """The outcomes of one kind; `due` is known at the end. `begin_s` is that of the last request."""

    kind: Kind
    right: int = 0
    right_s: float = -math.inf
    wrong: list[str] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    due: int = 0
    begin_s: float = 0.0
    in_flight_since_s: float = math.inf

    @property
    def sent(self) -> int:
        """The number of requests."""
        return self.right + len(self.wrong) + len(self.failed)

    def send(self, client: Any) -> None:
        """Send one request and count its outcome.

        Raises:
            Exception: the request failed.
        """
        self.begin_s = self.in_flight_since_s = time.monotonic()
        try:
            fault = self.kind.send(client)
        except RequestRefused as error:  # each kind expects its own refusals; this one has no reason
            fault = f"refused: {error}"
        finally:
            self.in_flight_since_s = math.inf
        if fault:
            self.wrong.append(f"{self.kind.name}: {fault}")
        else:
            self.right, self.right_s = self.right + 1, time.monotonic()

    def fail(self, text: str) -> None:
        """Count a failed request."""
        self.failed.append(Failure(time.monotonic(), self.begin_s, f"{self.kind.name}: {text}"))


class Traffic:
    """Sends requests of all kinds for the duration of the context.

    The times of a kind are fixed from the beginning. A request that is due while another runs is left out.
    """

    def __init__(self, kinds: Sequence[Kind], target: Target | None = None) -> None:
        self.tallies = [Tally(kind) for kind in kinds]
        self._target, self._over, self._began_s = target or Target("", ""), threading.Event(), 0.0
        self._threads = [
            threading.Thread(target=self._send_on, args=[tally, index / len(kinds)], daemon=True)
            for index, tally in enumerate(self.tallies)
        ]

    def __enter__(self) -> "Traffic":
        self._began_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        end_s = time.monotonic()
        for thread, tally in zip(self._threads, self.tallies, strict=True):
            tally.due = int((end_s - self._began_s) * tally.kind.per_s)
            thread.join(max(0.0, end_s + JOIN_S - time.monotonic()))
            if thread.is_alive():
                tally.fail(f"lost: neither a response nor a failure {JOIN_S:g} s after the end")

    @property
    def sent(self) -> int:
        """The number of all requests."""
        return sum(tally.sent for tally in self.tallies)

    def failures(self, since_s: float) -> list[Failure]:
        """Return the failed requests that ended after a time, the last one at the end."""
        errors = [error for tally in self.tallies for error in list(tally.failed) if error.end_s > since_s]
        return sorted(errors)

    def faults(self) -> list[str]:
        """Return the reasons of all wrong and failed requests."""
        failed = [failure.text for failure in self.failures(-math.inf)]
        return [*(text for tally in self.tallies for text in tally.wrong), *failed]

    def wait_calm(self, after: str, seconds: float, limit_s: float, is_ready: Callable[[], bool]) -> None:
        """Wait until all goes well for some seconds after a fault.

        Raises:
            RuntimeError: that takes longer than the limit; the message has the last failures.
        """
        since_s = time.monotonic()
        while not (self.is_calm(since_s, seconds) and is_ready()):
            if time.monotonic() - since_s > limit_s:
                last = "\n".join(failure.text for failure in self.failures(since_s)[-5:])
                raise RuntimeError(f"{after}: no recovery within {limit_s:g} s; the last failures:\n{last}")
            time.sleep(POLL_S)

    def is_calm(self, since_s: float, seconds: float) -> bool:
        """Check that all goes well again since a time, and that no request failed in the last seconds."""
        now = time.monotonic()
        return (
            now - since_s > seconds
            and all(tally.in_flight_since_s > since_s for tally in self.tallies)
            and all(tally.right_s > since_s for tally in self.tallies if tally.kind.per_s >= 1)
            and not self.failures(now - seconds)
        )

    def _send_on(self, tally: Tally, offset: float) -> None:
        period_s = 1 / tally.kind.per_s
        due_s = self._began_s + offset * period_s
        while not self._over.wait(max(0.0, due_s - time.monotonic())):
            try:
                tally.begin_s = time.monotonic()
                # A new client after each failure: gRPC reconnects an old one only after seconds.
                with tally.kind.opened(self._target) as client:
                    while not self._over.wait(max(0.0, due_s - time.monotonic())):
                        due_s += period_s * (1 + max(0, int((time.monotonic() - due_s) / period_s)))
                        tally.send(client)
            except Exception as error:  # a client that cannot be opened or closed has failed, too
                tally.fail(f"{type(error).__name__}: {error}")
                due_s = max(due_s, time.monotonic() + min(period_s, 0.5))


def classifiers(
    url: Callable[[ProtocolName], str],
    model: str,
    count: int,
    per_s: float,
    timeout_s: float = 30.0,
    check: Callable[[Prediction], str] = lambda prediction: "",
    api_key: str = "",
    answered: list[Span] | None = None,
) -> list[Kind]:
    """Return callers that classify a photo; every other one uses gRPC.

    Args:
        url: returns the address for a protocol.
        per_s: requests per second of each caller.
        check: returns the fault of an answer, empty for a right one.
        answered: gets begin and end of each request with an answer.
    """
    photo, spans = COFFEE.read_bytes(), [] if answered is None else answered

    def opened(protocol: ProtocolName, _: Target) -> Classifier:
        return Classifier(url(protocol), protocol, model, timeout_s, api_key=api_key)

    def send(classifier: Classifier) -> str:
        begin_s = time.monotonic()
        prediction = classifier.classify(photo, top_k=1)
        spans.append((begin_s, time.monotonic()))
        return check(prediction)

    return [
        Kind(f"caller {number}", per_s, partial(opened, PROTOCOLS[number % 2]), send)
        for number in range(count)
    ]

"""Requests of many kinds, each at its own rate, and their outcomes.

The clients block, so each kind has a thread of its own.
"""

import math
import operator
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from nereid.client.classifier_errors import ClassifierError
from nereid.client.request import ProtocolName

# The number of failures of a kind that are kept as text.
MAX_FAILURES = 3
# The limit on requests in flight at the end; all timeouts of callers are shorter.
JOIN_S = 90.0


@dataclass(frozen=True, slots=True)
class Target:
    """The addresses of server and gateway, each as HOST:PORT."""

    http: str
    grpc: str
    gateway: str

    def url(self, protocol: ProtocolName) -> str:
        """Return the server's address."""
        return self.http if protocol == "http" else self.grpc


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request.

    Args:
        name: of the kind.
        per_s: requests per second.
        opened: opens a client for the duration of its context.
        send: sends one request, or several in parallel; returns the fault of the outcome, empty for none.
        is_good: whether a correct response is expected, or a rejection.
        warming_per_s: requests per second of the warm-up, if larger.
    """

    name: str
    per_s: float
    opened: Callable[[Target], AbstractContextManager[Any]]
    send: Callable[[Any], str] = operator.call
    is_good: bool = True
    warming_per_s: float = 0.0

    def warming(self) -> "Kind":
        """Return the kind with its rate of the warm-up."""
        return replace(self, per_s=max(self.per_s, self.warming_per_s))


@dataclass(slots=True)
class Tally:
    """The outcomes of one kind."""

    kind: Kind
    sent: int = 0
    wrong: int = 0
    due: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def is_starved(self) -> bool:
        """Whether less than half of the due requests were sent; a hanging request blocks its kind."""
        return 2 * self.sent < self.due

    def add(self, failure: str) -> None:
        """Count one outcome."""
        self.sent += 1
        if failure:
            self.wrong += 1
            self.failures = [*self.failures, f"{self.kind.name}: {failure}"][:MAX_FAILURES]


class Traffic:
    """Sends requests of all kinds for the duration of the context, each kind from its own thread.

    The times of a kind are fixed from the beginning; a late response delays the next request at most.
    """

    def __init__(self, kinds: Sequence[Kind], target: Target) -> None:
        self.tallies = [Tally(kind) for kind in kinds]
        self._target = target
        self._over = threading.Event()
        self._began_s = 0.0
        self._threads = [
            threading.Thread(
                target=self._send_on, args=[tally, place / len(kinds)], name=tally.kind.name, daemon=True
            )
            for place, tally in enumerate(self.tallies)
        ]

    def __enter__(self) -> "Traffic":
        self._began_s = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        end_s = time.monotonic()
        for place, tally in enumerate(self.tallies):
            first_s = self._began_s + place / len(self.tallies) / tally.kind.per_s
            tally.due = max(0, math.ceil((end_s - first_s) * tally.kind.per_s))
        for thread in self._threads:
            thread.join(max(0.0, end_s + JOIN_S - time.monotonic()))
        for thread, tally in zip(self._threads, self.tallies, strict=True):
            if thread.is_alive():
                tally.add(f"neither a response nor a failure {JOIN_S:g} s after the end")

    def _send_on(self, tally: Tally, offset: float) -> None:
        period_s = 1 / tally.kind.per_s
        due_s = time.monotonic() + offset * period_s
        try:
            with tally.kind.opened(self._target) as client:
                while not self._over.wait(max(0.0, due_s - time.monotonic())):
                    tally.add(_failure(tally.kind.send, client))
                    due_s += period_s
        except Exception as error:  # a kind that cannot be opened or closed has failed
            tally.add(f"{type(error).__name__}: {error}")


def _failure(send: Callable[[Any], str], client: Any) -> str:
    try:
        return send(client)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def rejection(call: Callable[[], object], kind: type[ClassifierError], words: str) -> str:
    """Compare the error of a call with exactly this class and these words; returns the difference."""
    return compared(outcome(call), f"{kind.__name__}: ", words)


def outcome(call: Callable[[], object]) -> str:
    """Return the error of a call as `NAME: text`, or its result as text."""
    try:
        return f"{call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def compared(got: str, begins: str, words: str) -> str:
    """Compare an outcome with its expected begin and words; returns the difference."""
    if got.startswith(begins) and words in got:
        return ""
    return f"expected '{begins}… {words}', got '{got[:200]}'"

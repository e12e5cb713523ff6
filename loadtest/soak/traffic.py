"""Requests of many kinds, each at its own pace, and what became of them."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from nereid.client.errors import ClassifierError
from nereid.client.request import ProtocolName

# How many failures of a kind are kept in words.
MOST_TOLD = 3
# How long a request may take that is in flight at the end; every caller's own patience is shorter.
JOIN_S = 90.0
# Sends one request, or a few at once, and tells what was wrong with what came of it, if anything.
Send = Callable[[], str]


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, each as HOST:PORT."""

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
        name: what it is.
        per_s: how many times a second it is sent.
        opened: holds the connections, for as long as its context lasts.
        is_good: whether it must be answered; else it must be refused, or is not waited for.
        warming_per_s: how many times a second while the server warms up, if that is more.
    """

    name: str
    per_s: float
    opened: Callable[[Target], AbstractContextManager[Send]]
    is_good: bool = True
    warming_per_s: float = 0.0

    def warming(self) -> "Kind":
        """Return it as it is sent before anything is measured."""
        return replace(self, per_s=max(self.per_s, self.warming_per_s))


@dataclass(slots=True)
class Tally:
    """What became of the requests of one kind."""

    kind: Kind
    sent: int = 0
    wrong: int = 0
    due: int = 0
    told: list[str] = field(default_factory=list)

    @property
    def is_starved(self) -> bool:
        """Whether less than half was sent of what was due: a request that hangs holds up its kind."""
        return 2 * self.sent < self.due

    def add(self, failure: str) -> None:
        """Count one."""
        self.sent += 1
        if failure:
            self.wrong += 1
            self.told = [*self.told, f"{self.kind.name}: {failure}"][:MOST_TOLD]


class Traffic:
    """Sends requests of all kinds for as long as the context lasts, each kind from a thread of its own.

    The moments when a kind is sent are fixed from the beginning: an answer that is late delays none of them
    by more than itself.
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
                tally.add(f"no answer, and no failure, {JOIN_S:g} s after the end")

    def _send_on(self, tally: Tally, offset: float) -> None:
        period_s = 1 / tally.kind.per_s
        due_s = time.monotonic() + offset * period_s
        try:
            with tally.kind.opened(self._target) as send:
                while not self._over.wait(max(0.0, due_s - time.monotonic())):
                    tally.add(_failure(send))
                    due_s += period_s
        except Exception as error:  # a kind that cannot be opened or closed is as wrong as an answer
            tally.add(f"{type(error).__name__}: {error}")


def _failure(send: Send) -> str:
    try:
        return send()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refusal(call: Callable[[], object], kind: type[ClassifierError], words: str) -> str:
    """Tell how what a classifier raises differs from an error of exactly this kind, with these words."""
    return compared(outcome(call), f"{kind.__name__}: ", words)


def outcome(call: Callable[[], object]) -> str:
    """Return what a call raised as `NAME: text`, or what it gave."""
    try:
        return f"{call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def compared(got: str, begins: str, words: str) -> str:
    """Tell how an outcome differs from one that begins so and has these words in it."""
    if got.startswith(begins) and words in got:
        return ""
    return f"expected '{begins}… {words}', got '{got[:200]}'"

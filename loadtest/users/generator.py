"""Who sends when, in one process of a load test: callers take turns, which come at once or by a schedule.

Nothing here imports Locust, which changes the standard library of the process that imports it.
"""

import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import gevent
from gevent.event import Event
from gevent.queue import Queue

from loadtest.users.arrivals import NEVER, Arrivals, dispatch, offsets
from loadtest.users.ledger import Ledger

Scenario = Literal["closed", "open"]
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)
# A caller's patience with one request; after the end of the schedule, that with all that are due.
TIMEOUT_S, PATIENCE_S = 30.0, 35.0
LOOK_S, SHORT_S = 0.01, 1e-6
UNANSWERED = f"not answered within {PATIENCE_S:.0f} s after the end"


@dataclass(slots=True)
class _Line:
    """Turns of one protocol that are due, and the callers that are free."""

    due: Queue
    free: int = 0

    @property
    def backlog(self) -> int:
        return max(0, int(self.due.qsize()) - self.free)


class Generator:
    """The turns of one process.

    In a closed loop a caller's turn comes when it asks for one. In an open loop turns come by the clock: the
    callers bound how many are under way at once, and a turn that finds none of them free waits on the clock.

    Args:
        scenario: which of the two.
        draw: of the times.
    """

    def __init__(self, scenario: Scenario, draw: random.Random) -> None:
        self.ledger = Ledger()
        self._scenario, self._draw = scenario, draw
        self._lines: dict[str, _Line] = {}
        self._in_flight: dict[int, tuple[str, float]] = {}
        self._dispatcher: gevent.Greenlet | None = None
        self._over, self._end_s, self._is_finished = Event(), NEVER, False
        self._begin_s = self._last_s = time.monotonic()
        self._cpu_s = time.process_time()

    def schedule(self, rate_per_s: float, arrivals: Arrivals, callers: Mapping[str, int]) -> gevent.Greenlet:
        """Let turns come by the clock from now on, in place of an earlier schedule.

        Args:
            rate_per_s: of all protocols together, from this process.
            arrivals: how they are spread.
            callers: of each protocol in this process, which has so large a share of the turns.

        Raises:
            ValueError: no clock can keep this rate.
        """
        if not 0 < rate_per_s < NEVER:
            raise ValueError(f"expected a rate of more than 0 per second, got {rate_per_s}")
        if self._dispatcher:
            self._dispatcher.kill()
        else:
            self._begin_s, self._cpu_s = time.monotonic(), time.process_time()
        protocols, weights = list(callers), list(callers.values())

        def send(due_s: float) -> None:
            (protocol,) = self._draw.choices(protocols, weights)
            self._put(protocol, due_s)
            gevent.sleep(0)  # a dispatcher that is late must not keep the callers from running

        schedule = offsets(rate_per_s, arrivals, self._draw)
        arguments = schedule, time.monotonic(), time.monotonic, self._over.wait, send, lambda: self._end_s
        self._dispatcher = gevent.spawn(dispatch, *arguments)
        return self._dispatcher

    @contextmanager
    def turn(self, protocol: str) -> Iterator[float]:
        """Wait for a caller's turn, which is the context; gives when it was due, in monotonic seconds."""
        if self._scenario == "open":
            due_s = self._take(protocol)
        else:
            if self._over.is_set():
                gevent.sleep(PATIENCE_S * 2)  # until Locust stops this caller
            due_s = time.monotonic()
        number = id(gevent.getcurrent())
        self._in_flight[number] = protocol, due_s
        series = self.ledger.of(protocol)
        series.in_flight_max = max(series.in_flight_max, self._count(protocol))
        try:
            yield due_s
        except gevent.GreenletExit:
            if self._scenario == "open":
                self._line(protocol).due.put(due_s)  # this caller was taken away; another one sends it
            raise
        finally:
            self._in_flight.pop(number, None)
            self._last_s = time.monotonic()

    def finish(self) -> list[tuple[str, float]]:
        """End the schedule and wait for what is due; returns protocol and time of what nobody answered."""
        if not self._over.is_set():
            self._end_s = time.monotonic()
            self._over.set()
            self._wait()
            self.look()
            self._is_finished = True
        lost = [*self._in_flight.values()]
        self._in_flight.clear()
        for protocol, line in self._lines.items():
            while not line.due.empty():
                lost.append((protocol, line.due.get()))
        return lost

    def look(self) -> Ledger:
        """Return the ledger as it is now."""
        now = time.monotonic()
        if self._is_finished:
            return self.ledger
        self.ledger.cpu_share = (time.process_time() - self._cpu_s) / max(now - self._begin_s, SHORT_S)
        self.ledger.schedule_s = min(now, self._end_s) - self._begin_s
        self.ledger.seconds = max(self.ledger.schedule_s, self._last_s - self._begin_s)
        return self.ledger

    def _put(self, protocol: str, due_s: float) -> None:
        line, series = self._line(protocol), self.ledger.of(protocol)
        line.due.put(due_s)
        series.planned += 1
        series.backlog_max = max(series.backlog_max, line.backlog)

    def _take(self, protocol: str) -> float:
        line = self._line(protocol)
        line.free += 1
        try:
            return float(line.due.get())
        finally:
            line.free -= 1

    def _line(self, protocol: str) -> _Line:
        return self._lines.setdefault(protocol, _Line(Queue()))

    def _count(self, protocol: str) -> int:
        return sum(of == protocol for of, _ in self._in_flight.values())

    def _wait(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._is_busy():
            gevent.sleep(LOOK_S)

    def _is_busy(self) -> bool:
        is_dispatching = self._dispatcher is not None and not self._dispatcher.ready()
        is_due = any(not line.due.empty() for line in self._lines.values())
        return is_dispatching or is_due or bool(self._in_flight)

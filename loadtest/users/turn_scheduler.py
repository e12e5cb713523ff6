"""The schedule of one process of a load test: callers take turns, in a closed loop or by a clock.

This module does not import Locust, which patches the standard library of the importing process.
"""

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import gevent
from gevent.event import Event
from gevent.queue import Queue

from loadtest.users.run_statistics import RunStatistics

SCENARIOS, ARRIVALS = ("closed", "open"), ("poisson", "fixed")
# The timeout of one request, and after the end of the schedule that of all due requests.
TIMEOUT_S, DRAIN_S = 30.0, 35.0
POLL_S, MIN_DURATION_S = 0.01, 1e-6
UNANSWERED = f"not answered within {DRAIN_S:.0f} s after the end"


def arrival_offsets(rate_per_s: float, arrivals: str, draw: random.Random) -> Iterator[float]:
    """Yield the send times of an endless open loop, in seconds after its start.

    Fixed intervals begin at a random point of the first one, so that several processes do not send in step.
    """
    at_s = draw.random() / rate_per_s if arrivals == "fixed" else draw.expovariate(rate_per_s)
    while True:
        yield at_s
        at_s += 1 / rate_per_s if arrivals == "fixed" else draw.expovariate(rate_per_s)


@dataclass(slots=True)
class _Line:
    """The due turns of one protocol, and the number of free callers."""

    due: Queue
    free: int = 0

    @property
    def backlog(self) -> int:
        return max(0, int(self.due.qsize()) - self.free)


class TurnScheduler:
    """The turns of one process.

    In a closed loop a caller gets its turn immediately. In an open loop turns come by the clock. The number
    of callers limits the requests in flight; a turn that finds no free caller waits, and the clock goes on.
    """

    def __init__(self, scenario: str, draw: random.Random) -> None:
        self.statistics = RunStatistics()
        self._scenario, self._draw = scenario, draw
        self._lines: dict[str, _Line] = {}
        self._in_flight: dict[int, tuple[str, float]] = {}
        self._dispatcher: gevent.Greenlet | None = None
        self._over, self._end_s, self._is_finished = Event(), inf, False
        self._begin_s = self._last_s = time.monotonic()
        self._cpu_s = time.process_time()

    def schedule(self, rate_per_s: float, arrivals: str, callers: Mapping[str, int]) -> gevent.Greenlet:
        """Start turns by the clock, in place of an earlier schedule.

        Args:
            rate_per_s: of all protocols together, from this process.
            callers: number of callers by protocol, which is also the protocol's share of the turns.
        """
        if self._dispatcher:
            self._dispatcher.kill()
        else:
            self._begin_s, self._cpu_s = time.monotonic(), time.process_time()
        self._dispatcher = gevent.spawn(
            self._dispatch, arrival_offsets(rate_per_s, arrivals, self._draw), callers
        )
        return self._dispatcher

    @contextmanager
    def turn(self, protocol: str) -> Iterator[float]:
        """Wait for a caller's turn, which is the context; gives its due time in monotonic seconds."""
        if self._scenario == "open":
            due_s = self._take(protocol)
        else:
            if self._over.is_set():
                gevent.sleep(DRAIN_S * 2)  # until Locust stops this caller
            due_s = time.monotonic()
        number = id(gevent.getcurrent())
        self._in_flight[number] = protocol, due_s
        counts = self.statistics.of(protocol)
        in_flight = sum(other == protocol for other, _ in self._in_flight.values())
        counts.in_flight_max = max(counts.in_flight_max, in_flight)
        try:
            yield due_s
        except gevent.GreenletExit:
            if self._scenario == "open":
                self._line(protocol).due.put(due_s)  # Locust stopped this caller; another one sends
            raise
        finally:
            self._in_flight.pop(number, None)
            self._last_s = time.monotonic()

    def finish(self) -> list[tuple[str, float]]:
        """End the schedule and wait for due requests; returns protocol and due time of unanswered ones."""
        if not self._over.is_set():
            self._end_s = time.monotonic()
            self._over.set()
            deadline = time.monotonic() + DRAIN_S
            while time.monotonic() < deadline and self._is_busy():
                gevent.sleep(POLL_S)
            self.snapshot()
            self._is_finished = True
        lost = [*self._in_flight.values()]
        self._in_flight.clear()
        for protocol, line in self._lines.items():
            while not line.due.empty():
                lost.append((protocol, line.due.get()))
        return lost

    def snapshot(self) -> RunStatistics:
        """Return the present statistics."""
        now = time.monotonic()
        if self._is_finished:
            return self.statistics
        elapsed_s = max(now - self._begin_s, MIN_DURATION_S)
        self.statistics.cpu_share = (time.process_time() - self._cpu_s) / elapsed_s
        self.statistics.schedule_s = min(now, self._end_s) - self._begin_s
        self.statistics.seconds = max(self.statistics.schedule_s, self._last_s - self._begin_s)
        return self.statistics

    def _dispatch(self, offsets: Iterable[float], callers: Mapping[str, int]) -> None:
        """Give turns by the clock until the schedule ends; a delay moves no later turn."""
        start_s, protocols, weights = time.monotonic(), [*callers], [*callers.values()]
        for offset_s in offsets:
            due_s = start_s + offset_s
            while due_s <= self._end_s and (pause_s := due_s - time.monotonic()) > 0:
                self._over.wait(pause_s)
            if due_s > self._end_s:
                return
            (protocol,) = self._draw.choices(protocols, weights)
            self._put(protocol, due_s)
            gevent.sleep(0)  # a late dispatcher must not block the callers

    def _put(self, protocol: str, due_s: float) -> None:
        line, counts = self._line(protocol), self.statistics.of(protocol)
        line.due.put(due_s)
        counts.planned += 1
        counts.backlog_max = max(counts.backlog_max, line.backlog)

    def _take(self, protocol: str) -> float:
        line = self._line(protocol)
        line.free += 1
        try:
            return float(line.due.get())
        finally:
            line.free -= 1

    def _line(self, protocol: str) -> _Line:
        return self._lines.setdefault(protocol, _Line(Queue()))

    def _is_busy(self) -> bool:
        is_dispatching = self._dispatcher is not None and not self._dispatcher.ready()
        is_due = any(not line.due.empty() for line in self._lines.values())
        return is_dispatching or is_due or bool(self._in_flight)

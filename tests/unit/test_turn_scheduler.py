"""The turns of a load test's callers in one process: in a closed loop, and by the clock."""

import random
import statistics
import time
from itertools import islice, pairwise

import gevent
import pytest

from loadtest.users import turn_scheduler
from loadtest.users.turn_scheduler import TurnScheduler, arrival_offsets, dispatch

RATE, WATCHDOG_S = 400.0, 30.0


def call(turns: TurnScheduler, answered: list[float], service_s: float, protocol: str = "http") -> None:
    """Take turns permanently, each for `service_s`."""
    while True:
        with turns.turn(protocol) as due_s:
            gevent.sleep(service_s)
            answered.append(due_s)


@pytest.fixture
def callers():
    """Start callers that end with the test: `callers(turns, count, service_s)` gives when turns were due."""
    started = []

    def start(turns: TurnScheduler, count: int, service_s: float) -> list[float]:
        answered: list[float] = []
        started.extend(gevent.spawn(call, turns, answered, service_s) for _ in range(count))
        return answered

    yield start
    gevent.killall(started)


def test_all_that_was_due_is_answered_and_counts_from_when_it_was_due(callers):
    turns = TurnScheduler("open", random.Random(1))
    answered = callers(turns, 1, 0.01)
    turns.schedule(RATE, "fixed", {"http": 1})

    gevent.sleep(0.1)
    lost = turns.finish()

    series, statistics = turns.statistics.of("http"), turns.snapshot()
    assert lost == []
    assert len(answered) == series.planned
    distances = [after - before for before, after in pairwise(answered)]
    assert distances == pytest.approx([1 / RATE] * len(distances))
    assert series.backlog_max > series.planned / 3
    assert series.in_flight_max == 1
    assert statistics.seconds > 2 * statistics.schedule_s


def test_what_nobody_answers_is_not_forgotten(callers, monkeypatch):
    """After its patience, what is under way and what waits is given back, with when it was due."""
    monkeypatch.setattr(turn_scheduler, "DRAIN_S", 0.05)
    turns = TurnScheduler("open", random.Random(1))
    callers(turns, 1, 60.0)
    turns.schedule(RATE, "fixed", {"http": 1})

    gevent.sleep(0.1)
    lost = turns.finish()

    assert len(lost) == turns.statistics.of("http").planned > 2
    assert {protocol for protocol, _ in lost} == {"http"}
    assert [due_s for _, due_s in lost] == sorted(due_s for _, due_s in lost)
    assert all(due_s < time.monotonic() for _, due_s in lost)


def test_a_turn_whose_caller_was_taken_away_is_for_another(callers):
    """Locust stops callers whenever it spreads them anew; what was due stays due, since when it was due."""
    turns = TurnScheduler("open", random.Random(1))
    turns.schedule(RATE, "fixed", {"http": 1})
    leaving = gevent.spawn(call, turns, [], 60.0)
    gevent.sleep(0.02)
    leaving.kill()

    answered = callers(turns, 2, 0.0)
    lost = turns.finish()

    assert lost == []
    assert len(answered) == turns.statistics.of("http").planned


class Clock:
    """A clock that only `wait` advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def test_being_late_moves_no_later_time():
    """A dispatcher that was held up for 1.9 s sends what is due at once, then keeps to the schedule."""
    clock, sent = Clock(), []

    def send(due_s: float) -> None:
        sent.append((due_s, clock()))
        if due_s == 101.0:
            clock.wait(1.9)

    dispatch([1.0, 2.0, 2.5, 4.0], 100.0, clock, clock.wait, send)

    assert sent == [(101.0, 101.0), (102.0, 102.9), (102.5, 102.9), (104.0, 104.0)]


def test_poisson_intervals_have_mean_and_deviation_of_their_rate():
    """Intervals of a Poisson process are exponential: the standard deviation equals the mean."""
    times = list(islice(arrival_offsets(50.0, "poisson", random.Random(1)), 20_000))

    intervals = [after - before for before, after in pairwise(times)]

    # The standard error of both is about 0.7 %.
    assert statistics.mean(intervals) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(intervals) == pytest.approx(1 / 50, rel=0.03)

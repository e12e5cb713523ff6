"""The open loop's schedule: its times, and that being late moves none of them."""

import random
import statistics
from itertools import islice, pairwise

import pytest

from loadtest.users.arrivals import dispatch, offsets


class Clock:
    """A clock that moves when it is waited for, or by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now_s

    def wait(self, seconds: float) -> None:
        """Let so much time pass."""
        self.now_s += seconds


def test_poisson_distances_have_mean_and_spread_of_their_rate():
    """Distances of a Poisson process are exponential: the standard deviation equals the mean."""
    times = list(islice(offsets(50.0, "poisson", random.Random(1)), 20_000))

    distances = [after - before for before, after in pairwise(times)]

    # The standard error of both is about 0.7 %.
    assert statistics.mean(distances) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(distances) == pytest.approx(1 / 50, rel=0.03)


def test_fixed_distances_are_equal_and_begin_within_the_first():
    """Fixed arrivals are one distance apart; only where they begin is drawn."""
    times = list(islice(offsets(50.0, "fixed", random.Random(1)), 1_000))

    assert 0 <= times[0] < 1 / 50
    assert [after - before for before, after in pairwise(times)] == pytest.approx([1 / 50] * 999)


def test_two_processes_with_fixed_distances_do_not_send_in_step():
    """Each begins somewhere else, else their requests would come in pairs."""
    first, second = (next(offsets(50.0, "fixed", random.Random(seed))) for seed in (1, 2))

    assert first != second


def test_requests_are_sent_at_their_times():
    """A dispatcher that is not late waits until each time has come."""
    clock, sent = Clock(), []

    dispatch([1.0, 2.5, 3.0], 100.0, clock, clock.wait, lambda due_s: sent.append((due_s, clock())))

    assert sent == [(101.0, 101.0), (102.5, 102.5), (103.0, 103.0)]


def test_being_late_moves_no_later_time():
    """A dispatcher that was held up for 1.9 s sends what is due at once, then keeps to the schedule."""
    clock, sent = Clock(), []

    def send(due_s: float) -> None:
        sent.append((due_s, clock()))
        if due_s == 101.0:
            clock.wait(1.9)

    dispatch([1.0, 2.0, 2.5, 4.0], 100.0, clock, clock.wait, send)

    assert sent == [(101.0, 101.0), (102.0, 102.9), (102.5, 102.9), (104.0, 104.0)]


def test_what_was_due_before_the_end_is_sent_even_late():
    """The end cuts the schedule by the intended times, so that a late dispatcher loses none."""
    clock, sent = Clock(), []

    def send(due_s: float) -> None:
        sent.append(due_s)
        clock.wait(5.0)

    dispatch([1.0, 2.0, 3.0, 4.0], 100.0, clock, clock.wait, send, lambda: 103.5)

    assert sent == [101.0, 102.0, 103.0]


def test_the_end_is_noticed_while_waiting():
    """Nothing is sent after the end, however long the next distance was."""
    clock, sent, ends = Clock(), [], iter([float("inf"), 100.5, 100.5])

    dispatch([1.0], 100.0, clock, lambda seconds: clock.wait(0.5), sent.append, lambda: next(ends))

    assert sent == []

"""The verdict of the torture program fails for planted wrong answers, lost requests and leaks."""

import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from loadtest.torture import verdict
from loadtest.torture.changes import Photo
from loadtest.torture.observation import gauges
from loadtest.torture.requests import refused
from loadtest.torture.traffic import Failure, Kind, Tally, Target, Traffic
from nereid.client.classifier_errors import RequestRefused, ServerFailed, TimedOut
from nereid.client.prediction import Label, Prediction, Timings
from nereid.metrics_page import Snapshot
from tests.tables import cases

WATCHDOG_S = 30.0
TARGET = Target("", "")
RIGHT = Prediction((Label(967, "espresso", 0.9),), "classify", "1", "v1", "weight", "", Timings(0, 0))


def photo() -> Photo:
    """Return a photo of which version 1 says espresso, without a network."""
    made = Photo.__new__(Photo)
    made.known = {"1": (967, 0.9)}
    return made


def raising(error: Exception):
    def call() -> None:
        raise error

    return call


def failed(verdicts) -> list[str]:
    return [each.what for each in verdicts if not each.is_good]


def test_answer_has_its_class_score_and_version_and_a_refusal_its_words():
    other, weak = (
        replace(RIGHT, labels=(Label(*label),)) for label in ((1, "fish", 0.9), (967, "espresso", 0.8))
    )
    assert photo().fault(RIGHT) == ""
    assert all(photo().fault(each) for each in (other, weak, replace(RIGHT, version="2")))

    assert refused(raising(RequestRefused("invalid image: none")), "invalid image: ") == ""
    assert refused(raising(RequestRefused("unknown model")), "invalid image: ")
    assert refused(lambda: RIGHT, "invalid image: ")
    with pytest.raises(ServerFailed):  # a server that fails has refused nothing
        refused(raising(ServerFailed("invalid image: none")), "invalid image: ")


@cases(
    ("send", "may_fail", "expected"),
    {
        "right": (lambda client: "", False, []),
        "wrong amid faults": (lambda client: "a goldfish", True, ["wrong outcomes"]),
        "refused amid faults": (lambda client: raising(RequestRefused("no"))(), True, ["wrong outcomes"]),
        "failed": (lambda client: raising(TimedOut("late"))(), False, ["failed requests"]),
        "failed amid faults": (
            lambda client: raising(TimedOut("late"))(),
            True,
            ["kinds without a right outcome"],
        ),
    },
)
def test_outcomes_of_traffic_are_judged(send, may_fail, expected):
    with Traffic([Kind("odd", 50, nullcontext, send)], TARGET) as traffic:
        deadline = time.monotonic() + WATCHDOG_S
        while not traffic.sent and time.monotonic() < deadline:
            time.sleep(0.01)

    found = [each.partition(" (")[0] for each in failed(verdict.judge_traffic(traffic.tallies, may_fail))]
    assert set(expected) <= set(found)
    assert bool(expected) == bool(found)


def test_fault_is_over_when_all_kinds_succeed_again():
    now = time.monotonic()
    traffic = Traffic([Kind("any", 1, nullcontext, str)], TARGET)
    good = Tally(traffic.tallies[0].kind, right=1, right_s=now)
    odd = {
        "failed": replace(good, failed=[Failure(now, now, "late")]),
        "silent": replace(good, right_s=now - 20),
        "waiting": replace(good, in_flight_since_s=now - 20),
    }

    traffic.tallies = [good]
    assert traffic.is_calm(now - 10, 5)
    for tally in odd.values():
        traffic.tallies = [tally]
        assert not traffic.is_calm(now - 10, 5)


MINUTES = np.arange(100) / 10
NOISE = np.random.default_rng(1).normal(0, 3, len(MINUTES))


@cases(
    ("more", "is_good"),
    {
        "sawtooth": (60 * (MINUTES % 0.5), True),
        "step at the start": (60.0 * (MINUTES > 0.5), True),
        "peaks": (np.where(np.arange(100) % 20, 0, 200), True),
        "below the bound": (0.3 * MINUTES, True),
        "leak": (8 * MINUTES, False),
        "in steps": (8 * np.floor(MINUTES) + 60 * (MINUTES % 0.5), False),
    },
)
def test_leak_is_told_from_noise(more, is_good):
    assert verdict.grown("memory", list(800 + NOISE + more), 8.0).is_good is is_good


def test_memory_of_each_process_and_of_changes_is_judged():
    flat = {"memory, a": 50.0, "memory, b": 50.0, "memory in all, server": 100.0}
    leaking = [{**flat, "memory, b": 50.0 + place} for place in range(20)]
    charged = [{**flat, "memory in all, server": 100.0 + 2 * place} for place in range(20)]

    assert failed(verdict.judge_memory([flat] * 20, [flat] * 20, 5)) == []
    assert failed(verdict.judge_memory(leaking, [flat] * 20, 5)) == ["memory, b"]
    assert failed(verdict.judge_memory([flat] * 20, charged, 5)) == [
        "memory in all, server, 5 rounds of changes"
    ]
    with pytest.raises(ValueError, match="expected 8 samples, got 3; fix: a longer soak"):
        list(verdict.judge_memory([flat] * 3, [], 0))


def test_counts_may_fall_and_not_rise():
    before = {"open files": 10.0, "zombies": 0.0, "threads, server": 20.0}
    fewer = {"open files": 9.0, "zombies": 0.0, "threads, server": 21.0}
    more = {"open files": 11.0, "zombies": 1.0, "threads, server": 20.0}

    assert failed(verdict.judge_quiet(before, fewer)) == []
    assert failed(verdict.judge_quiet(before, more)) == ["open files", "zombies"]


def test_gauge_that_is_on_no_page_is_not_zero():
    """One that has another name now would pass for ever."""
    with pytest.raises(LookupError, match="no page has nereid_gateway_in_flight"):
        gauges(Snapshot.parse("nereid_route_in_flight 1"))

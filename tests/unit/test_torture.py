"""The verdict of the torture program fails for planted wrong answers, lost requests and leaks."""

import time
from contextlib import nullcontext

import numpy as np
import pytest

from loadtest.torture import verdict
from loadtest.torture.observation import gauges
from loadtest.torture.traffic import Kind, Target, Traffic
from nereid.base.metrics_page import Snapshot
from nereid.client.classifier_errors import RequestRefused, TimedOut
from tests.tables import cases

WATCHDOG_S = 30.0
TARGET = Target("", "")


def raising(error: Exception):
    def call() -> None:
        raise error

    return call


def failed(verdicts) -> list[str]:
    return [each.what for each in verdicts if not each.is_good]


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


def test_gauge_that_is_on_no_page_is_not_zero():
    """One that has another name now would pass for ever."""
    with pytest.raises(LookupError, match="no page has nereid_gateway_in_flight"):
        gauges(Snapshot.parse("nereid_route_in_flight 1"))

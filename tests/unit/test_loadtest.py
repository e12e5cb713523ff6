"""Verdicts of load tests and of the torture program, and who may import Locust."""

import re
import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from loadtest.torture import verdict
from loadtest.torture.observation import gauges
from loadtest.torture.traffic import Kind, Target, Traffic
from loadtest.users.report import Report, Row
from loadtest.users.thresholds import Limits, Thresholds, compare
from nereid.base.metrics_page import Snapshot
from nereid.client.classifier_errors import RequestRefused, TimedOut
from tests.tables import cases

ROW = Row(
    protocol="http",
    requests=200,
    failures={},
    rate_per_s=19.0,
    target_per_s=20.0,
    achieved_ratio=0.95,
    backlog_max=0,
    in_flight_max=4,
    response_ms={"p50": 20.0, "p99": 80.0},
    service_ms={"p50": 10.0, "p99": 10.0},
)
LIMITS = Limits(p50_ms=20.0, p99_ms=80.0, error_ratio=0.01, achieved_ratio=0.95)


def missed(report: Report, limits: Limits = LIMITS) -> list[tuple[str, str, str]]:
    thresholds = Thresholds(generator_cpu=0.8, open=limits)
    return [(line.name, line.expected, line.got) for line in compare(report, thresholds) if not line.is_met]


def report(**row: object) -> Report:
    """Return that of an open loop which just meets its limits, but for what is given."""
    return Report("open", 10.0, 1, 0.8, (replace(ROW, **row),))


@cases(
    ("row", "expected"),
    just_met=({}, []),
    few_errors=({"failures": {"any": 2}}, []),
    p50=({"response_ms": {"p50": 21.0, "p99": 80.0}}, [("http p50", "≤ 20 ms", "21 ms")]),
    p99=({"response_ms": {"p50": 20.0, "p99": 81.5}}, [("http p99", "≤ 80 ms", "81.5 ms")]),
    errors=({"failures": {"any": 2, "other": 1}}, [("http error ratio", "≤ 0.01", "0.015")]),
    achieved=({"achieved_ratio": 0.9}, [("http achieved ratio", "≥ 0.95", "0.9")]),
    no_target=({"achieved_ratio": None}, []),
    nothing=({"requests": 0}, [("http correct responses", "≥ 1", "0")]),
    service=({"service_ms": {"p50": 999.0, "p99": 999.0}}, []),
    refused_within_a_millisecond=(
        {"failures": {"refused": 200}, "achieved_ratio": None},
        [("http correct responses", "≥ 1", "0"), ("http error ratio", "≤ 0.01", "1")],
    ),
)
def test_limits_are_held(row, expected):
    assert missed(report(**row)) == expected


@cases(
    ("changes", "expected"),
    a_busy_generator_has_measured_itself=(
        {"generator_cpu": 0.81},
        ("generator, share of a core", "≤ 0.8", "0.81"),
    ),
    lost_processes=({"lost": 1}, ("processes lost", "≤ 0", "1")),
    nothing_asked=({"rows": ()}, ("protocols", "≥ 1", "0")),
)
def test_a_run_without_proof_fails(changes, expected):
    assert missed(replace(report(), **changes)) == [expected]


IMPORT = re.compile(r"^\s*(from|import) .*\b(locust|locust_users|locust_events|locustfile)\b", re.M)


def test_only_the_locustfile_and_what_is_for_it_import_locust(root):
    """Tests and measurements that share these modules would get a patched standard library."""
    rooms = ("loadtest", "nereid", "clients", "tests")
    files = [path for room in rooms for path in (root / room).rglob("*.py")]

    found = {str(path.relative_to(root)) for path in files if IMPORT.search(path.read_text())}

    users = {f"loadtest/users/locust_{name}.py" for name in ("events", "users")}
    assert found == {"loadtest/locustfile.py", *users}


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
    right=(lambda client: "", False, []),
    wrong_amid_faults=(lambda client: "a goldfish", True, ["wrong outcomes"]),
    refused_amid_faults=(lambda client: raising(RequestRefused("no"))(), True, ["wrong outcomes"]),
    failed=(lambda client: raising(TimedOut("late"))(), False, ["failed requests"]),
    failed_amid_faults=(lambda client: raising(TimedOut("late"))(), True, ["kinds without a right outcome"]),
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
    sawtooth=(60 * (MINUTES % 0.5), True),
    step_at_the_start=(60.0 * (MINUTES > 0.5), True),
    peaks=(np.where(np.arange(100) % 20, 0, 200), True),
    below_the_bound=(0.3 * MINUTES, True),
    leak=(8 * MINUTES, False),
    in_steps=(8 * np.floor(MINUTES) + 60 * (MINUTES % 0.5), False),
)
def test_leak_is_told_from_noise(more, is_good):
    assert verdict.grown("memory", list(800 + NOISE + more), 8.0).is_good is is_good


def test_gauge_that_is_on_no_page_is_not_zero():
    """One that has another name now would pass for ever."""
    with pytest.raises(LookupError, match="no page has nereid_gateway_in_flight"):
        gauges(Snapshot.parse("nereid_route_in_flight 1"))

"""What a load test must reach, and what a file of it may say."""

from dataclasses import replace

from loadtest.users.report import Report, Row
from loadtest.users.thresholds import Limits, Thresholds, compare
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
    {
        "just met": ({}, []),
        "few errors": ({"failures": {"any": 2}}, []),
        "p50": ({"response_ms": {"p50": 21.0, "p99": 80.0}}, [("http p50", "≤ 20 ms", "21 ms")]),
        "p99": ({"response_ms": {"p50": 20.0, "p99": 81.5}}, [("http p99", "≤ 80 ms", "81.5 ms")]),
        "errors": ({"failures": {"any": 2, "other": 1}}, [("http error ratio", "≤ 0.01", "0.015")]),
        "achieved": ({"achieved_ratio": 0.9}, [("http achieved ratio", "≥ 0.95", "0.9")]),
        "no target": ({"achieved_ratio": None}, []),
        "nothing": ({"requests": 0}, [("http correct responses", "≥ 1", "0")]),
        "service": ({"service_ms": {"p50": 999.0, "p99": 999.0}}, []),
        "refused within a millisecond": (
            {"failures": {"refused": 200}, "achieved_ratio": None},
            [("http correct responses", "≥ 1", "0"), ("http error ratio", "≤ 0.01", "1")],
        ),
    },
)
def test_limits_are_held(row, expected):
    assert missed(report(**row)) == expected


@cases(
    ("changes", "expected"),
    {
        "a busy generator has measured itself": (
            {"generator_cpu": 0.81},
            ("generator, share of a core", "≤ 0.8", "0.81"),
        ),
        "lost processes": ({"lost": 1}, ("processes lost", "≤ 0", "1")),
        "nothing asked": ({"rows": ()}, ("protocols", "≥ 1", "0")),
    },
)
def test_a_run_without_proof_fails(changes, expected):
    assert missed(replace(report(), **changes)) == [expected]

"""What a load test must reach, and what a file of it may say."""

from dataclasses import replace

import pytest

from loadtest import load
from loadtest.users.report import Report, Row
from loadtest.users.thresholds import DEFAULT, InvalidThresholds, Limits, Thresholds, compare, read

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
    """Return what failed, expected and got."""
    thresholds = Thresholds(generator_cpu=0.8, open=limits)
    return [(line.name, line.expected, line.got) for line in compare(report, thresholds) if not line.is_met]


def report(**row: object) -> Report:
    """Return that of an open loop which just meets its limits, but for what is given."""
    return Report("open", 10.0, 1, 0.8, (replace(ROW, **row),))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, []),
        ({"failures": {"any": 2}}, []),
        ({"response_ms": {"p50": 21.0, "p99": 80.0}}, [("http p50", "≤ 20 ms", "21 ms")]),
        ({"response_ms": {"p50": 20.0, "p99": 81.5}}, [("http p99", "≤ 80 ms", "81.5 ms")]),
        ({"failures": {"any": 2, "other": 1}}, [("http error ratio", "≤ 0.01", "0.015")]),
        ({"achieved_ratio": 0.9}, [("http achieved ratio", "≥ 0.95", "0.9")]),
        ({"achieved_ratio": None}, []),
        ({"requests": 0}, [("http correct responses", "≥ 1", "0")]),
        ({"service_ms": {"p50": 999.0, "p99": 999.0}}, []),
    ],
    ids=["just met", "few errors", "p50", "p99", "errors", "achieved", "no target", "nothing", "service"],
)
def test_limits_are_held(row, expected):
    """Each limit fails alone, with what was expected and what came; response times count."""
    assert missed(report(**row)) == expected


def test_a_busy_generator_fails():
    """Then it has measured itself."""
    assert missed(replace(report(), generator_cpu=0.81)) == [("generator, share of a core", "≤ 0.8", "0.81")]


def test_a_run_that_lost_a_process_fails():
    """What that one would still have sent was never asked, and nobody knows what became of the rest."""
    assert missed(replace(report(), lost=1)) == [("processes lost", "≤ 0", "1")]


def test_only_failures_fail_whatever_the_limits():
    """A connection refused within a millisecond meets every limit of latency."""
    assert missed(report(failures={"refused": 200}), Limits(p99_ms=80.0)) == [
        ("http correct responses", "≥ 1", "0")
    ]


def test_a_run_that_asked_nothing_fails():
    """No protocol, no proof."""
    assert missed(replace(report(), rows=())) == [("protocols", "≥ 1", "0")]


def test_what_is_left_out_is_not_held():
    """A limit that is not set looks at nothing; one right answer there must be."""
    slow = {"p50": 1e6, "p99": 1e6}

    assert missed(report(response_ms=slow, failures={"any": 199}, achieved_ratio=0.0), Limits()) == []


def test_the_file_that_ships_holds_every_limit():
    """Both loops, all that applies to them."""
    thresholds = read(DEFAULT)

    assert None not in (thresholds.closed.p50_ms, thresholds.closed.p99_ms, thresholds.closed.error_ratio)
    assert None not in (thresholds.open.p50_ms, thresholds.open.p99_ms, thresholds.open.error_ratio)
    assert thresholds.open.achieved_ratio


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[closed]\np95_ms = 3", "unknown field `p95_ms` - at `$.closed`"),
        ("[warm]\np99_ms = 3", "unknown field `warm`"),
        ("[open]\np99_ms = '3'", "Expected `float"),
        ("[open]\np99_ms = 0", "> 0.0"),
        ("[open]\nerror_ratio = 1.5", "<= 1.0"),
        ("open = 3", "Expected `object`"),
        ("[open", "Expected ']'"),
    ],
    ids=["key", "scenario", "type", "zero", "share", "no table", "no TOML"],
)
def test_bad_files_are_refused(tmp_path, text, told):
    """The message names the file, the place, what was expected and what came."""
    path = tmp_path / "mine.toml"
    path.write_text(text)

    with pytest.raises(InvalidThresholds) as refused:
        read(path)

    assert str(refused.value).startswith(f"{path}: ")
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--thresholds", "missing.toml"], "missing.toml"),
        (["--seconds", "0"], "--seconds"),
        (["--rate", "-1"], "--rate"),
        (["--rate", "nan"], "--rate"),
        (["--seconds", "inf"], "--seconds"),
        (["--unknown"], "--unknown"),
    ],
    ids=["no file", "no time", "no rate", "no number", "no end", "option"],
)
def test_the_runner_refuses_what_cannot_be_meant(words, told, capsys):
    """Before a server is started, with exit code 2."""
    with pytest.raises(SystemExit) as refused:
        load.parse(words)

    assert refused.value.code == 2
    assert told in capsys.readouterr().err

"""Verdicts of load tests, and the load generator's counts and process."""

import re
import time
from dataclasses import replace

import pytest

from loadtest.users.report import Report, Row
from loadtest.users.thresholds import Limits, Thresholds, compare
from nereid.insight.tune import load_generator
from nereid.insight.tune.load_generator import LoadResult, Response, closed_loop, summary, within
from tests import http_receiver
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
THRESHOLDS = Thresholds(generator_cpu=0.8, open=LIMITS)


def report(**row: object) -> Report:
    """Return that of an open loop which just meets its limits, but for what is given."""
    return Report("open", 10.0, 1, 0.8, (replace(ROW, **row),))


@cases(
    just_met=(report(), []),
    few_errors=(report(failures={"any": 2}), []),
    p50=(report(response_ms={"p50": 21.0, "p99": 80.0}), [("http p50", "≤ 20 ms", "21 ms")]),
    p99=(report(response_ms={"p50": 20.0, "p99": 81.5}), [("http p99", "≤ 80 ms", "81.5 ms")]),
    errors=(report(failures={"any": 2, "other": 1}), [("http error ratio", "≤ 0.01", "0.015")]),
    achieved=(report(achieved_ratio=0.9), [("http achieved ratio", "≥ 0.95", "0.9")]),
    no_target=(report(achieved_ratio=None), []),
    nothing=(report(requests=0), [("http correct responses", "≥ 1", "0")]),
    service=(report(service_ms={"p50": 999.0, "p99": 999.0}), []),
    refused_within_a_millisecond=(
        report(failures={"refused": 200}, achieved_ratio=None),
        [("http correct responses", "≥ 1", "0"), ("http error ratio", "≤ 0.01", "1")],
    ),
    a_busy_generator_has_measured_itself=(
        replace(report(), generator_cpu=0.81),
        [("generator, share of a core", "≤ 0.8", "0.81")],
    ),
    lost_processes=(replace(report(), lost=1), [("processes lost", "≤ 0", "1")]),
    nothing_asked=(replace(report(), rows=()), [("protocols", "≥ 1", "0")]),
)
def test_limits_are_held_and_a_run_without_proof_fails(found, expected):
    missed = [(line.name, line.expected, line.got) for line in compare(found, THRESHOLDS) if not line.is_met]

    assert missed == expected


def test_only_the_locustfile_and_what_is_for_it_import_locust(root):
    """Tests and measurements that share these modules would get a patched standard library."""
    line = re.compile(r"^\s*(from|import) .*\b(locust|locust_users|locust_events|locustfile)\b", re.M)
    rooms = ("loadtest", "nereid", "clients", "tests")
    files = [path for room in rooms for path in (root / room).rglob("*.py")]

    importers = {str(path.relative_to(root)) for path in files if line.search(path.read_text())}

    users = {f"loadtest/users/locust_{name}.py" for name in ("events", "users")}
    assert importers == {"loadtest/locustfile.py", *users}


HOST = "127.0.0.1"


def answer(path, headers, body):
    """Respond with the status in the path, after the milliseconds in the body."""
    time.sleep(int(body) / 1e3)
    return int(path[1:]), b""


@pytest.fixture
def port():
    with http_receiver.receiving(answer) as address:
        yield int(address.rpartition(":")[2])


def request(port: int, status: int, wait_ms: int) -> bytes:
    return load_generator.post_request(HOST, port, f"/{status}", str(wait_ms).encode(), {})


def test_rejections_do_not_count_as_responses(port):
    load = closed_loop(HOST, port, [request(port, 503, 5)], concurrency=2, seconds=0.2)

    assert (load.rate, load.p99_ms, load.answered) == (0.0, 0.0, 0)
    assert load.failed > 0


@pytest.mark.parametrize("requests", [[b""], ["text"]], ids=["nothing listens", "any other error"])
def test_caller_that_ends_with_an_error_is_a_failure(port, requests):
    """A load whose callers ended must not look healthy."""
    load = closed_loop(HOST, 1 if requests == [b""] else port, requests, concurrency=3, seconds=0.1)

    assert load == LoadResult(0.0, 0.0, 0.0, 0.0, 0, 3)


def test_request_without_a_response_is_a_failure(port, monkeypatch):
    """A server with hanging requests must not look fast because of the other requests."""
    monkeypatch.setattr(load_generator, "DRAIN_TIMEOUT_S", 0.2)
    requests = [request(port, 200, 1), request(port, 200, 3_000)]

    load = closed_loop(HOST, port, requests, concurrency=4, seconds=0.3)

    assert load.answered > 0
    assert load.failed == 4


def test_failures_count_at_any_time_and_latencies_within_the_span():
    seen = [(0.0, 0.1, 503), (0.0, 0.3, 200), (0.3, 0.5, 200), (0.5, 1.1, 200), (0.6, 1.5, 503)]
    responses = [Response(*row) for row in seen]

    assert within(responses, 0.2, 1.0, 1.6) == summary(responses[2:4], 1.1 - 0.3, lost=2)
    # With at most one response in the span, all count.
    assert within([Response(0.0, 2.0, 200)], 0.2, 1.0, 2.1) == summary([Response(0.0, 2.0, 200)], 2.1)


@pytest.mark.parametrize("begin_s", [0.41, 0.45, 0.53])
def test_rate_of_batches_does_not_depend_on_where_a_span_begins(begin_s):
    """Eight responses every 0.1 s are 80 per second; a fixed span would give 64 or 80."""
    ends = [round(0.1 * number, 1) for number in range(1, 13) for _ in range(8)]
    responses = [Response(end - 0.2, end, 200) for end in ends]

    assert within(responses, begin_s, begin_s + 0.48, 1.3).rate == pytest.approx(80)


def test_other_process_loads_at_each_concurrency(port, tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_bytes(request(port, 200, 1))

    loads = load_generator.run(port, paths, [1, 3], 0.2)

    assert [*loads] == [1, 3]
    assert all(load.answered > 0 and load.failed == 0 and load.p99_ms >= 1 for load in loads.values())


def test_summary_counts_successful_responses_only():
    responses = [Response(0.0, 0.010 * number, 200) for number in range(1, 101)] + [Response(0.0, 9.0, 503)]

    assert summary(responses, 2.0, lost=1) == LoadResult(50.0, 500.0, 900.0, 990.0, 100, 2)
    assert summary([], 2.0) == LoadResult(0.0, 0.0, 0.0, 0.0, 0, 0)

"""The counts and histograms of a load test, and their sums over processes."""

import msgpack
import pytest

from loadtest.users.report import Report
from loadtest.users.run_statistics import STRAYED, RunStatistics


def test_wait_before_a_request_is_part_of_its_latency():
    part = RunStatistics()
    part.of("http").add(100.0, 10.0, "")

    merged = RunStatistics.merged([part.encode()]).of("http")

    assert merged.response.percentile_ms(50) == pytest.approx(100, rel=1e-3)
    assert merged.service.percentile_ms(50) == pytest.approx(10, rel=1e-3)


def statistics(good: int, failures: dict[str, int], **about: object) -> RunStatistics:
    """Return that of one process which asked over HTTP."""
    result = RunStatistics(**about)
    series = result.of("http")
    for _ in range(good):
        series.add(20.0, 10.0, "")
    for reason, times in failures.items():
        for _ in range(times):
            series.add(5.0, 5.0, reason)
    return result


def test_statistics_of_processes_add_up():
    first = statistics(8, {"slow": 1}, schedule_s=2.0, seconds=2.5, cpu_share=0.3)
    second = statistics(4, {"slow": 2, "wrong": 1}, schedule_s=2.1, seconds=2.2, cpu_share=0.5)
    first.of("http").planned, second.of("http").planned = 9, 8
    first.of("http").backlog_max, second.of("http").backlog_max = 3, 2

    # As they go over Locust's own wire.
    whole = RunStatistics.merged(msgpack.unpackb(msgpack.packb(each.encode())) for each in (first, second))

    series = whole.of("http")
    assert (whole.processes, whole.schedule_s, whole.seconds, whole.cpu_share) == (2, 2.1, 2.5, 0.5)
    assert (series.planned, series.good, series.requests, series.backlog_max) == (17, 12, 16, 5)
    assert series.failures == {"slow": 3, "wrong": 1}
    assert series.response.count == series.service.count == 16


def test_a_key_that_two_processes_saw_on_two_variants_is_a_failure():
    """A sticky key gets one variant, whoever asks: the later answer is no longer right, over its protocol."""
    first, second = statistics(2, {}), statistics(2, {})
    second.of("grpc").good = 3
    first.moved("caller-1", "v1", "http")
    second.moved("caller-1", "v2", "grpc")
    second.moved("caller-2", "v2", "http")

    whole = RunStatistics.merged(msgpack.unpackb(msgpack.packb(each.encode())) for each in (first, second))

    series = {name: (each.good, each.failures, each.requests) for name, each in whole.series.items()}
    assert series == {"http": (4, {}, 4), "grpc": (2, {STRAYED: 1}, 3)}


def test_report_counts_only_right_answers_as_achieved():
    whole = statistics(30, {"wrong": 10}, schedule_s=4.0, seconds=5.0)
    whole.of("http").planned = 40

    (row,) = Report.of("open", whole).rows

    assert (row.rate_per_s, row.target_per_s, row.achieved_ratio) == (6.0, 10.0, 0.6)
    assert row.error_ratio == 0.25
    (closed,) = Report.of("closed", statistics(3, {}, seconds=1.0)).rows
    assert (closed.rate_per_s, closed.target_per_s, closed.achieved_ratio) == (3.0, None, None)
    assert (row.response_ms["p50"], row.service_ms["p50"]) == pytest.approx((20.0, 10.0), rel=1e-3)

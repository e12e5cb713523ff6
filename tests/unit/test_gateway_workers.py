"""The state that the workers of a gateway share, without a server."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from nereid.base.errors import OperationFailed
from nereid.gateway import shared_tables
from nereid.gateway.gateway_metrics import RecentLoad
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.shared_tables import SLOTS_PER_SET, SharedTable
from nereid.gateway.workers import MAX_REPORT_AGE_S, METRICS_FOLDER, Report, SharedState
from tests.commands import captured

WATCHDOG_S = 60
# Workers that print when they start, of which one ends when the test says so.
POOL = """
import os, sys, time
from pathlib import Path
from nereid.base.errors import OperationFailed
from nereid.gateway.workers import WorkerPool
from nereid.base.processes import StopFlag

def work(number, listens):
    stop = StopFlag()
    os.write(1, b"worker %d %d\\n" % (number, os.getpid()))  # in one piece
    if sys.argv[1] == "broken" and number:
        raise OperationFailed("why")
    listens()
    while not stop.is_set():
        time.sleep(0.01)

say = lambda line: print(line, flush=True)
WorkerPool(2, work, say, lambda number: None).run(lambda: say("all listen"))
"""
# Four processes that take tokens of one key in the same moment, and then one that takes some of two keys.
QUOTAS = """
import os, sys
from contextlib import suppress
from datetime import UTC, datetime
from nereid.gateway.keys import Quotas, make
from nereid.gateway.failures import Failure

BURST = int(sys.argv[1])
quotas = Quotas(1e-9, BURST)
anna, bert = (make(name, frozenset({"infer"}), datetime.now(UTC))[0] for name in ("anna", "bert"))

def taken(owner, tries):
    found = 0
    for _ in range(tries):
        with suppress(Failure):
            quotas.take(owner)
            found += 1
    return found

start, go = os.pipe()
pids = []
for _ in range(4):
    if not (pid := os.fork()):
        os.read(start, 1)
        os._exit(taken(anna, BURST // 2))  # the status of a process has one byte
    pids.append(pid)
os.write(go, b"." * 4)
print(sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids), taken(anna, 1), taken(bert, 1))
"""


def test_processes_share_the_tokens_of_a_key():
    burst = 400

    done = captured([sys.executable, "-c", QUOTAS, str(burst)], timeout=WATCHDOG_S)

    assert (done.stdout.split(), done.stderr) == ([str(burst), "0", "1"], "")


def test_table_never_fills_up(monkeypatch):
    monkeypatch.setattr(shared_tables, "SETS", 1)
    table, names = SharedTable("d"), [f"{number:08x}" for number in range(SLOTS_PER_SET + 1)]
    for at_s, name in enumerate(names):
        with table.locked(name) as record:
            record[:] = [float(at_s)]

    values = []
    for name in names:
        with table.locked(name) as record:
            values += record or [None]

    assert values == [None, *range(1, SLOTS_PER_SET + 1)]


def state(folder, number: int) -> SharedState:
    return SharedState(number, 3, folder)


def test_worker_sees_recent_reports_of_the_others(tmp_path):
    now = time.monotonic()
    load = RecentLoad()
    for number, at_s in enumerate((now, now, now - MAX_REPORT_AGE_S)):
        state(tmp_path, number).report(Report(at_s, number, 9, {"classify": load.window()}))

    assert [report.in_flight for report in state(tmp_path, 0).others()] == [1]
    assert [report.in_flight for report in state(tmp_path, 2).others()] == [0, 1]


def test_last_minute_of_all_workers_adds_up(tmp_path, clock):
    ours, theirs = RecentLoad(clock), RecentLoad(clock)
    for load, seconds, variant in ((ours, 0.01, "v1"), (theirs, 0.1, "v1"), (theirs, 0.1, "v2")):
        for _ in range(10):
            load.record("ok", variant, seconds)
    theirs.record("overloaded", "", 0.0)
    clock.now_s = 1002
    state(tmp_path, 1).report(Report(time.monotonic(), 0, 0, {"classify": theirs.window()}))
    (report,) = state(tmp_path, 0).others()

    total = ours.state(3, 8, other_windows=[report.models["classify"]])

    assert (total.requests_per_s, total.in_flight, total.limit) == (15.5, 3, 8)
    assert total.outcomes == {"ok": 30, "overloaded": 1}
    assert [point.requests_per_s for point in total.history] == [31, 0]
    assert [(row.variant, row.share) for row in total.variants] == [("v1", 0.6667), ("v2", 0.3333)]
    assert total.variants[0].p50_ms == pytest.approx(10, rel=0.15)
    assert total.variants[0].p99_ms == pytest.approx(100, rel=0.15)
    clock.now_s = 1080
    assert ours.state(0, 8).outcomes == {}
    assert {point.p50_ms for point in ours.state(0, 8).history} == {None}


@pytest.mark.parametrize(("count", "buffered"), [(1, 2**28), (2, 2**27), (3, 2**27), (64, 2**27)])
def test_memory_for_bodies_is_divided(tmp_path, count, buffered):
    settings = SharedState(0, count, tmp_path).settings(GatewaySettings())

    assert settings == replace(GatewaySettings(), max_buffered_bytes=buffered)


def test_metrics_are_not_mixed_with_those_of_another_program(tmp_path, monkeypatch):
    """A folder that the environment sets has other metrics in it."""
    monkeypatch.setenv(METRICS_FOLDER, "/elsewhere")

    with pytest.raises(OperationFailed, match=f"{METRICS_FOLDER} is set to '/elsewhere', .*; fix: unset"):
        state(tmp_path, 0).share_metrics()


def test_ended_worker_leaves_no_gauges(tmp_path):
    """Its counters stay, because the worker that replaces it goes on with them."""
    for name in ("gauge_livesum_1.db", "gauge_livesum_2.db", "counter_1.db"):
        (tmp_path / name).touch()

    state(tmp_path, 0).forget(1)

    assert {path.name for path in tmp_path.iterdir()} == {"gauge_livesum_2.db", "counter_1.db"}


@pytest.fixture
def pool(request):
    command = [sys.executable, "-c", POOL, getattr(request, "param", "good")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate(timeout=WATCHDOG_S)


def started(process: subprocess.Popen) -> dict[int, int]:
    lines = [process.stdout.readline().split() for _ in range(3)]
    assert lines[2] == ["all", "listen"]
    return {int(number): int(pid) for _, number, pid in lines[:2]}


def test_gateway_without_any_worker_ends(pool):
    pids = started(pool)
    os.kill(pool.pid, signal.SIGSTOP)  # both are dead when it looks again
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)

    os.kill(pool.pid, signal.SIGCONT)

    _, errors = pool.communicate(timeout=WATCHDOG_S)
    assert pool.returncode == 1
    assert "all workers of the gateway have ended; their reasons are above" in errors


def test_workers_end_with_a_killed_parent(pool):
    started(pool)

    pool.kill()

    # The pipe of the output ends with the last process that has it.
    assert pool.communicate(timeout=WATCHDOG_S) == ("", "")


@pytest.mark.parametrize("pool", ["broken"], indirect=True)
def test_worker_that_cannot_start_ends_the_gateway(pool):
    out, errors = pool.communicate(timeout=WATCHDOG_S)

    assert pool.returncode == 1
    assert "all listen" not in out
    assert "error: why" in errors
    assert "a worker of the gateway did not start; see the error above" in errors

"""Parts of the supervisor: models to probe, ends of processes, temporary folders, usage of processes."""

import os
import subprocess
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from nereid.application.gateway_program import gateway
from nereid.application.launcher import command
from nereid.backends.triton.stub_processes import TICKS_PER_S, Process
from nereid.base.prometheus_text import MetricSamples
from nereid.server import gateway_process
from nereid.server.embedded_server import EnvironmentFolders
from nereid.server.gateway_process import GatewayProcess
from nereid.server.supervision import process_usage, watchdog
from nereid.server.supervision.process_usage import ProcessMetrics, Usage, read_tree
from nereid.server.supervision.watchdog import Activity, ExitWaiter, RequestCounts


def kept(launch) -> tuple[GatewayProcess, list[str]]:
    lines: list[str] = []
    return GatewayProcess(launch, lines.append), lines


def silent() -> subprocess.Popen[str]:
    return subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE, text=True)


def test_gateway_that_never_listens_is_started_again(monkeypatch):
    made, lines = kept(silent)
    made._launch()
    assert made.keep() == "the gateway is starting"
    monkeypatch.setattr(gateway_process, "START_TIMEOUT_S", 0.0)

    made.keep()
    made._process.wait()

    assert made.keep() == "the gateway exited with status -9"
    assert lines == ["supervisor: the gateway exited with status -9; restarting in 0.1 s"]
    made.stop()


def test_gateway_that_the_system_does_not_start_is_tried_again():
    """For example for lack of processes."""

    def refuse() -> subprocess.Popen[str]:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    launches = iter([lambda: subprocess.Popen(["false"], stdout=subprocess.PIPE, text=True), refuse, silent])
    made, lines = kept(lambda: next(launches)())
    made._launch()
    made._process.wait()
    made.keep()
    time.sleep(0.1)
    made.keep()
    assert lines[-1] == (
        "supervisor: the gateway cannot be started: [Errno 11] Resource temporarily unavailable; "
        "next try in 1 s"
    )
    made._back_off.due_at = 0.0
    made.keep()

    assert made.keep() == "the gateway is starting"
    made.stop()


class Models:
    def __init__(self, *names: str) -> None:
        self.activity, self.now_s = Activity(), 1000.0
        self.counts = {name: RequestCounts() for name in names}
        self.answered: set[str] = set()

    def answer(self, *names: str, failures: int = 0) -> None:
        for name in names:
            before = self.counts[name]
            self.counts[name] = RequestCounts(before.succeeded + (not failures), before.failed + failures)

    def poll(self, later_s: float = watchdog.POLL_INTERVAL_S) -> set[str]:
        self.now_s += later_s
        self.answered = self.activity.poll(self.counts, self.now_s)
        return self.activity.take_due(self.now_s)

    def probe(self, name: str, is_success: bool = True) -> None:
        """End a probe, which Triton counts as a request."""
        self.answer(name, failures=not is_success)
        self.activity.record_probe(name, is_success)


@pytest.fixture
def idle():
    """Three models that have answered one request each, as at the start of a server."""
    models = Models("a", "b", "c")
    models.answer("a", "b", "c")
    assert models.poll() == set()
    return models


def test_models_that_never_answered_are_probed_together():
    assert Models("a", "b", "c").poll() == {"a", "b", "c"}


def test_idle_models_are_probed_in_turn(idle):
    probes: dict[str, list[float]] = {name: [] for name in idle.counts}
    for _ in range(30):
        due = idle.poll()
        assert len(due) <= 1
        for name in due:
            probes[name].append(idle.now_s)
            idle.probe(name)

    gaps = [b - a for times in probes.values() for a, b in pairwise(times)]
    assert all(watchdog.IDLE_PROBE_INTERVAL_S <= gap <= 2 * watchdog.IDLE_PROBE_INTERVAL_S for gap in gaps)


def test_model_that_answers_is_probed_seldom(idle):
    """Requests of others show that it works; a hanging instance among several is found by rare probes."""
    probed_s = []
    for _ in range(30):
        idle.answer("a")
        if "a" in idle.poll():
            probed_s.append(idle.now_s)
            idle.probe("a")
        assert "a" in idle.answered

    assert {b - a for a, b in pairwise(probed_s)} == {watchdog.BUSY_PROBE_INTERVAL_S}


def test_failed_probe_is_repeated_until_one_succeeds(idle):
    """Answers to others do not show that the instance which failed works again."""
    idle.answer("b")
    idle.answer("b", failures=1)
    assert (idle.poll(), idle.answered) == ({"b"}, set())
    idle.probe("b", is_success=False)
    for _ in range(3):
        idle.answer("b")
        assert "b" in idle.poll()
        assert "b" not in idle.answered

    idle.probe("b")
    assert "b" not in idle.poll()
    assert "b" in idle.answered


def test_loaded_model_counts_from_zero(idle):
    idle.answer(*["a"] * 5)
    idle.poll()
    idle.counts["a"] = RequestCounts(1)
    idle.poll()

    assert idle.answered == {"a"}


def test_end_of_a_probe_of_an_unloaded_model_is_ignored(idle):
    idle.probe("a", is_success=False)
    del idle.counts["a"]
    idle.poll()
    idle.activity.record_probe("a", False)

    assert idle.poll() <= {"b", "c"}


def test_counts_are_those_of_all_versions():
    def entry(name, version, succeeded, failed):
        outcomes = {"success": {"count": succeeded}, "fail": {"count": failed}}
        return {"name": name, "version": version, "inference_stats": outcomes}

    statistics = {"model_stats": [entry("a", "1", 3, 1), entry("a", "7", 4, 0), entry("b", "1", 0, 0)]}

    assert watchdog.read_counts(statistics) == (
        {"a": {1, 7}, "b": {1}},
        {"a": RequestCounts(7, 1), "b": RequestCounts()},
    )


WATCHDOG_S = 60.0


@pytest.fixture
def exits():
    exits = ExitWaiter()
    yield exits
    exits.close()


@pytest.fixture
def process():
    with subprocess.Popen(["sleep", str(WATCHDOG_S)]) as process:
        yield process
        process.kill()


def waited_s(exits: ExitWaiter, pids, timeout_s: float = WATCHDOG_S) -> float:
    start_s = time.monotonic()
    exits.wait(pids, timeout_s)
    return time.monotonic() - start_s


def test_end_of_a_process_ends_the_wait(exits, process):
    """Also if it is gone before the wait; one that is no longer named does not."""
    threading.Timer(0.2, process.kill).start()
    assert waited_s(exits, {process.pid}) < WATCHDOG_S
    assert process.wait() != 0
    assert waited_s(exits, (), 0.2) >= 0.2
    assert waited_s(exits, {process.pid}) < WATCHDOG_S


@pytest.mark.parametrize("when", ["before", "during"])
def test_interruption_ends_one_wait(exits, process, when):
    if when == "before":
        exits.interrupt()
    else:
        threading.Timer(0.2, exits.interrupt).start()
    assert waited_s(exits, {process.pid}) < WATCHDOG_S
    assert waited_s(exits, {process.pid}, 0.2) >= 0.2


def test_kernel_that_cannot_watch_is_asked_often(exits, process, monkeypatch):
    """Linux before 5.3 and some sandboxes have no such file; then the wait ends soon."""

    def refuse(pid):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.pidfd_open", refuse)

    assert waited_s(exits, {process.pid}) < WATCHDOG_S


def test_removed_folder_is_there_while_the_server_ends(tmp_path):
    of_another, removed, kept = (tmp_path / f"python_env_{name}" for name in ("another", "own", "kept"))
    of_another.mkdir()
    folders = EnvironmentFolders(tmp_path)
    removed.mkdir()
    kept.mkdir()
    folders.note()
    removed.rmdir()
    of_another.rmdir()

    with folders.kept():
        assert {*tmp_path.iterdir()} == {removed, kept}
    assert {*tmp_path.iterdir()} == {kept}


SUPERVISOR, SERVER, STUB, OTHER_STUB, GATEWAY, WORKER, HOOK = 10, 11, 12, 13, 14, 15, 16


@pytest.fixture
def proc(tmp_path):
    """A supervisor with a server of two model processes, a gateway with a worker, and a hook's command."""
    stub = "stub /models/dogs/3/model.py a b c d e f dogs_0_{}"
    for pid, parent, name, words, ticks, kilobytes in (
        (SUPERVISOR, 1, "nereid", "", 100, 1),
        (SERVER, SUPERVISOR, "tritonserver", "", 200, 2),
        (STUB, SERVER, "triton (py) b", stub.format(0), 300, 3),
        (OTHER_STUB, SERVER, "triton (py) b", stub.format(1), 400, 4),
        (GATEWAY, SUPERVISOR, "python", " ".join(command(gateway)), 500, 5),
        (WORKER, GATEWAY, "python", "python worker", 600, 6),
        (HOOK, SUPERVISOR, "sh", "sh -c gateway", 700, 7),
        (99, 1, "tritonserver", "of another server", 800, 8),
    ):
        (folder := tmp_path / str(pid)).mkdir()
        fields = ["S", parent, *[0] * 9, ticks // 2, ticks - ticks // 2, *[0] * 6, 1000 + pid, *[0] * 30]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))}\n")
        (folder / "cmdline").write_text(words.replace(" ", "\0") + "\0")
        (folder / "smaps_rollup").write_text(f"Rss: 999999 kB\nPss:   {kilobytes} kB\nPss_Anon: 7 kB\n")
    return tmp_path


def test_processes_have_the_name_of_their_part(proc):
    parts = {part.process.pid: part for part in process_usage.read(SUPERVISOR, Path("/models"), proc)}
    stub, worker = parts[STUB], parts[WORKER]

    assert {*parts} == {SUPERVISOR, SERVER, STUB, OTHER_STUB, GATEWAY, WORKER}
    names = [parts[pid].name for pid in (SUPERVISOR, SERVER, GATEWAY)]
    assert names == ["supervisor", "tritonserver", "gateway"]
    assert (stub.name, stub.version, stub.cpu_s * TICKS_PER_S, stub.memory_bytes) == ("dogs", 3, 300, 3072)
    assert (worker.name, worker.version, worker.cpu_s * TICKS_PER_S) == ("gateway", 0, 600)


def test_a_gateway_of_its_own_has_its_workers(proc):
    assert [part.process.pid for part in read_tree(GATEWAY, "gateway", proc)] == [GATEWAY, WORKER]
    assert read_tree(GATEWAY + 1000, "gateway", proc) == []
    assert [process_usage.parent_of(pid, proc) for pid in (WORKER, 1000)] == [GATEWAY, 0]


def test_this_process_has_a_time_and_memory():
    (own_usage,) = (part for part in read_tree(os.getpid(), "tests") if part.process.pid == os.getpid())
    times = os.times()

    assert own_usage.cpu_s == pytest.approx(times.user + times.system, abs=1)  # the reading itself takes time
    assert own_usage.memory_bytes > 10 * 2**20
    assert process_usage.memory_bytes(2**30) == 0


def usage(pid: int, name: str, cpu_s: float, memory: int = 1) -> Usage:
    return Usage(Process(pid, pid), name, 1, cpu_s, memory)


MEMORY, CPU = "nereid_process_memory_bytes", "nereid_process_cpu_seconds_total"


def pages_of(*looks: list[Usage]) -> list[MetricSamples]:
    remaining = iter(looks)
    metrics = ProcessMetrics(lambda: next(remaining))
    return [MetricSamples.parse(metrics.page()) for _ in looks]


def test_processes_of_one_name_are_added():
    (page,) = pages_of([usage(1, "dogs", 2.5, 30), usage(2, "dogs", 1.0, 20), usage(3, "cats", 4.0, 10)])

    assert page.sums(MEMORY, "process") == {("dogs",): 50, ("cats",): 10}
    assert page.sums(CPU, "process") == {("dogs",): 3.5, ("cats",): 4.0}
    assert {*page.samples} == {MEMORY, CPU}


def test_cpu_time_never_falls():
    looks = ([(1, 5.0), (2, 3.0)], [(1, 6.0), (7, 0.5)], [(1, 6.0), (7, 2.0)], [])
    pages = pages_of(*([usage(pid, "dogs", seconds) for pid, seconds in look] for look in looks))

    assert [page.sums(CPU, "process")["dogs",] for page in pages] == [8.0, 9.5, 11.0, 11.0]
    assert pages[-1].sums(MEMORY, "process") == {}


def test_a_reused_pid_is_another_process():
    first, second = Usage(Process(1, 10), "dogs", 1, 5.0, 1), Usage(Process(1, 20), "dogs", 1, 1.0, 1)

    assert [page.total(CPU) for page in pages_of([first], [second])] == [5.0, 6.0]

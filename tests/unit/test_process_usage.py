"""CPU time and memory of a server's processes, read from a folder that looks like `/proc`."""

import os
from pathlib import Path

import pytest

from nereid.application.child import command
from nereid.application.gateway_program import gateway
from nereid.backends.triton.stub_processes import Process
from nereid.base.metrics_page import Snapshot
from nereid.server.supervision.process_usage import (
    TICKS_PER_S,
    ProcessMetrics,
    Usage,
    memory_bytes,
    parent_of,
    read,
    read_tree,
)

REPOSITORY = Path("/models")
SUPERVISOR, SERVER, STUB, OTHER_STUB, GATEWAY, WORKER, HOOK = 10, 11, 12, 13, 14, 15, 16


class Proc:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, pid: int, parent: int, name: str, words: str = "", ticks: int = 0, kilobytes: int = 0):
        own = self.folder / str(pid)
        own.mkdir()
        fields = ["S", parent, *[0] * 9, ticks // 2, ticks - ticks // 2, *[0] * 6, 1000 + pid, *[0] * 30]
        (own / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))}\n")
        (own / "cmdline").write_text(words.replace(" ", "\0") + "\0")
        (own / "smaps_rollup").write_text(f"Rss: 999999 kB\nPss:   {kilobytes} kB\nPss_Anon: 7 kB\n")


@pytest.fixture
def proc(tmp_path):
    """A supervisor with a server of two model processes, a gateway with a worker, and a hook's command."""
    found = Proc(tmp_path)
    stub = "stub /models/dogs/3/model.py a b c d e f dogs_0_{}"
    found.add(SUPERVISOR, 1, "nereid", ticks=100, kilobytes=1)
    found.add(SERVER, SUPERVISOR, "tritonserver", ticks=200, kilobytes=2)
    found.add(STUB, SERVER, "triton (py) b", stub.format(0), 300, 3)
    found.add(OTHER_STUB, SERVER, "triton (py) b", stub.format(1), 400, 4)
    found.add(GATEWAY, SUPERVISOR, "python", " ".join(command(gateway)), 500, 5)
    found.add(WORKER, GATEWAY, "python", "python worker", 600, 6)
    found.add(HOOK, SUPERVISOR, "sh", "sh -c gateway", 700, 7)
    found.add(99, 1, "tritonserver", "of another server", 800, 8)
    return found


def test_processes_have_the_name_of_their_part(proc):
    found = {each.process.pid: each for each in read(SUPERVISOR, REPOSITORY, proc.folder)}
    stub, worker = found[STUB], found[WORKER]

    assert {*found} == {SUPERVISOR, SERVER, STUB, OTHER_STUB, GATEWAY, WORKER}
    assert [found[pid].name for pid in (SUPERVISOR, SERVER, GATEWAY)] == [
        "supervisor",
        "tritonserver",
        "gateway",
    ]
    assert (stub.name, stub.version, stub.cpu_s * TICKS_PER_S, stub.memory_bytes) == ("dogs", 3, 300, 3072)
    assert (worker.name, worker.version, worker.cpu_s * TICKS_PER_S) == ("gateway", 0, 600)


def test_a_gateway_of_its_own_has_its_workers(proc):
    assert [each.process.pid for each in read_tree(GATEWAY, "gateway", proc.folder)] == [GATEWAY, WORKER]
    assert read_tree(GATEWAY + 1000, "gateway", proc.folder) == []
    assert (parent_of(WORKER, proc.folder), parent_of(1000, proc.folder)) == (GATEWAY, 0)


def test_this_process_has_a_time_and_memory():
    (own,) = (each for each in read_tree(os.getpid(), "tests") if each.process.pid == os.getpid())
    times = os.times()

    assert own.cpu_s == pytest.approx(times.user + times.system, abs=1)  # the reading itself takes time
    assert own.memory_bytes > 10 * 2**20
    assert memory_bytes(2**30) == 0


def usage(pid: int, name: str, cpu_s: float, memory: int = 1) -> Usage:
    return Usage(Process(pid, pid), name, 1, cpu_s, memory)


def pages_of(*looks: list[Usage]) -> list[dict[tuple[str, str], float]]:
    remaining = iter(looks)
    metrics = ProcessMetrics(lambda: next(remaining))
    return [
        {
            (name.removeprefix("nereid_process_"), process): value
            for name in page.samples
            for (process,), value in page.sums(name, "process").items()
        }
        for page in (Snapshot.parse(metrics.page()) for _ in looks)
    ]


def test_processes_of_one_name_are_added():
    (page,) = pages_of([usage(1, "dogs", 2.5, 30), usage(2, "dogs", 1.0, 20), usage(3, "cats", 4.0, 10)])

    memory = {("memory_bytes", "dogs"): 50, ("memory_bytes", "cats"): 10}
    assert page == memory | {("cpu_seconds_total", "dogs"): 3.5, ("cpu_seconds_total", "cats"): 4.0}


def test_cpu_time_never_falls():
    pages = pages_of(
        [usage(1, "dogs", 5.0), usage(2, "dogs", 3.0)],
        [usage(1, "dogs", 6.0), usage(7, "dogs", 0.5)],
        [usage(1, "dogs", 6.0), usage(7, "dogs", 2.0)],
        [],
    )

    assert [page["cpu_seconds_total", "dogs"] for page in pages] == [8.0, 9.5, 11.0, 11.0]
    assert ("memory_bytes", "dogs") not in pages[-1]


def test_a_reused_pid_is_another_process():
    first, second = Usage(Process(1, 10), "dogs", 1, 5.0, 1), Usage(Process(1, 20), "dogs", 1, 1.0, 1)

    assert [page["cpu_seconds_total", "dogs"] for page in pages_of([first], [second])] == [5.0, 6.0]

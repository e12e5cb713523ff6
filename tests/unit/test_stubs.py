"""Stub processes: dead ones, found from the states of processes, and their shared memory."""

import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nereid.backends.triton import stub_memory, stub_processes
from nereid.backends.triton.stub_memory import StubMemory, remove_stale
from nereid.backends.triton.stub_processes import Process, Stub
from nereid.server.supervision import supervisor
from nereid.server.supervision.supervisor import DEAD_AFTER_S, KnownStubs, ProbeStrikes
from tests.tables import cases

FIRST = Stub(Process(10, 100), "model", 1, "model_0_0")
SECOND = Stub(Process(11, 101), "model", 1, "model_0_1")
REPLACEMENT = replace(FIRST, process=Process(12, 500))
OTHER_VERSION = replace(FIRST, process=Process(13, 600), version=2)
LIVES, ENDED = "S", "Z"


@cases(
    ended_a_moment_ago=([{FIRST: LIVES}, {FIRST: ENDED}], []),
    ended_and_still_there=([{FIRST: LIVES, SECOND: LIVES}, *[{FIRST: ENDED, SECOND: LIVES}] * 2], [FIRST]),
    collected_by_Triton=([{FIRST: LIVES}, {}, {}], []),
    replaced=([{FIRST: LIVES}, {FIRST: ENDED}, {FIRST: ENDED, REPLACEMENT: LIVES}], []),
    another_version=([{FIRST: LIVES}, {FIRST: ENDED}, {FIRST: ENDED, OTHER_VERSION: LIVES}], [FIRST]),
    its_replacement_has_died_too=(
        [{FIRST: LIVES}, {FIRST: ENDED, REPLACEMENT: LIVES}, *[{FIRST: ENDED, REPLACEMENT: ENDED}] * 2],
        [FIRST, REPLACEMENT],
    ),
    stopped=([{FIRST: LIVES}, {FIRST: "T"}, {FIRST: "T"}], []),
)
def test_zombie_that_stays_and_is_not_replaced_is_dead(observations, dead):
    """A stub that Triton ended is collected, so only killed stubs count."""
    stubs, zombies = KnownStubs(), []
    for number, observation in enumerate(observations):
        living = [stub for stub, state in observation.items() if state != ENDED]
        states = {stub.process: state for stub, state in observation.items()}
        zombies = stubs.update(living, states, number * DEAD_AFTER_S)

    assert zombies == dead


def test_stubs_in_use_are_the_youngest_of_each_version():
    """An instance's name is shared by versions, and by old stubs that Triton has not ended yet."""
    stubs = KnownStubs()
    all_of_them = [FIRST, SECOND, REPLACEMENT, OTHER_VERSION]
    stubs.update(all_of_them, {stub.process: LIVES for stub in all_of_them}, 0)

    assert stubs.find_active("model_0_0") == [REPLACEMENT, OTHER_VERSION]
    assert stubs.filter_active([FIRST.process, SECOND.process]) == [SECOND]
    assert stubs.stubs_of_versions("model", [2]) == [OTHER_VERSION]


def test_second_verdict_within_a_while_is_final():
    """One unhealthy response may be a pause of the machine; a second one soon after is not."""
    strikes = ProbeStrikes()

    are_final = [strikes.add("model_0_0", now_s) for now_s in (0, 40, 45, 46)]
    dead = list(strikes.dead)
    strikes.clear("model_0_0")

    assert (are_final, dead, strikes.dead) == ([False, False, True, True], ["model_0_0"], {})
    assert not strikes.add("model_0_0", 47)
    assert strikes.add("model_0_1", 0, is_stopped=True)


def add(proc: Path, pid: int, parent: int, state: str = LIVES, started: int = 7, words=()) -> None:
    (folder := proc / str(pid)).mkdir()
    between = " ".join(["0"] * 17)
    (folder / "stat").write_text(f"{pid} (a ) (name) {state} {parent} {between} {started} 0 0\n")
    (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))


def command(path: str, instance: str) -> tuple[str, ...]:
    """Return a stub's command line as Triton 24.10 writes it."""
    return ("/b/stub", path, "region", "1048576", "1048576", "1", "/b/python", "336", instance, "/b/fused")


def test_stubs_are_the_living_children_with_a_model_of_the_repository(tmp_path):
    add(tmp_path, 2, parent=1, words=command("/r/eyes/3/model.py", "eyes_0_1"))
    add(tmp_path, 3, parent=9, words=command("/r/eyes/3/model.py", "eyes_0_0"))
    add(tmp_path, 4, parent=1, state=ENDED)
    add(tmp_path, 5, parent=1, words=command("/elsewhere/eyes/3/model.py", "eyes_0_0"))
    add(tmp_path, 6, parent=1, words=("sh",))
    add(tmp_path, 7, parent=1, words=command("/r/eyes/model.py", "eyes_0_0"))
    (tmp_path / "self").mkdir()

    assert stub_processes.find(1, Path("/r"), tmp_path) == [Stub(Process(2, 7), "eyes", 3, "eyes_0_1")]


@pytest.mark.parametrize(("age_s", "has_process"), [(0.0, True), (60.0, True), (600.0, False)])
def test_process_has_an_age(tmp_path, age_s, has_process):
    """The kernel counts ticks since boot."""
    started = (time.clock_gettime(time.CLOCK_BOOTTIME) - 120) * os.sysconf("SC_CLK_TCK")
    add(tmp_path, 2, os.getppid(), started=int(started), words=command("/r/eyes/3/model.py", "eyes_0_1"))

    assert stub_processes.has_process(Path("/r"), "eyes_0_0", age_s, tmp_path) == has_process


def test_state_is_that_of_the_same_process_only(tmp_path):
    add(tmp_path, 2, parent=1, state="T", started=7)

    states = stub_processes.states([Process(2, 7), Process(2, 6), Process(3, 7)], tmp_path)

    assert states == {Process(2, 7): "T"}


def test_touched_version_is_newer_than_anything_in_it(tmp_path):
    """Triton compares with the newest time it has seen, which may lie in the future."""
    future_ns = time.time_ns() + 3600 * 10**9
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "model.onnx").touch()
    (tmp_path / "broken link").symlink_to("nowhere")
    os.utime(tmp_path / "deep" / "model.onnx", ns=(future_ns, future_ns))

    is_touched = supervisor.touch(tmp_path)

    times = {path.stat().st_mtime_ns for path in (tmp_path, tmp_path / "deep", tmp_path / "deep/model.onnx")}
    assert (is_touched, min(times) > future_ns) == (True, True)
    assert not supervisor.touch(tmp_path / "not there")


NAME = "nereid-0123"
# Claims a server's memory in a folder, and waits to be killed.
SERVER = """
import sys, time
from pathlib import Path
from nereid.backends.triton import stub_memory
stub_memory.FOLDER = Path(sys.argv[1])
memory = stub_memory.StubMemory(sys.argv[2])
memory.claim()
print("claimed", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(stub_memory, "FOLDER", tmp_path)
    return tmp_path


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_regions_become_private(folder):
    (folder / f"{NAME}-a").touch(0o644)
    (folder / "nereid-4567-b").touch(0o644)
    (folder / "own").touch(0o644)
    (folder / f"{NAME}-link").symlink_to(folder / "own")

    StubMemory(NAME).protect()

    modes = [stat.S_IMODE((folder / name).stat().st_mode) for name in (f"{NAME}-a", "nereid-4567-b", "own")]
    assert modes == [0o600, 0o644, 0o644]


def test_memory_of_a_killed_server_is_removed(folder):
    (folder / f"{NAME}-a").touch()
    (folder / "nereid-1000-client").touch()
    words = [sys.executable, "-c", SERVER, str(folder), NAME]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as server:
        server.stdout.readline()
        assert remove_stale() == []
        assert names(folder) == [f"{NAME}-a", f"{NAME}.lock", "nereid-1000-client"]
        os.kill(server.pid, signal.SIGKILL)

    assert remove_stale() == [NAME]
    assert names(folder) == ["nereid-1000-client"]


def test_stopped_server_leaves_only_foreign_folders(folder):
    memory = StubMemory(NAME)
    for is_foreign in (False, False, True):
        memory.claim()
        (folder / f"{NAME}-b").touch()
        if is_foreign:
            (folder / f"{NAME}-a").mkdir()
        assert remove_stale() == []
        memory.remove()
        assert names(folder) == [f"{NAME}-a"] * is_foreign


def test_lock_that_is_a_link_is_left_alone(folder):
    """Other users may create any file there."""
    (folder / "own").touch()
    (folder / f"{NAME}.lock").symlink_to(folder / "own")

    assert remove_stale() == []
    assert names(folder) == [f"{NAME}.lock", "own"]

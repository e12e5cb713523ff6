"""Shared memory of stubs: private, and removed by the next one when the server was killed."""

import os
import signal
import stat
import subprocess
import sys

import pytest

from nereid.backends.triton import stub_memory
from nereid.backends.triton.stub_memory import StubMemory, remove_stale

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

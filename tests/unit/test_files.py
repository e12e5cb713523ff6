"""Files are replaced atomically, and locks exclude other processes until theirs ends."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nereid.base import files

WATCHDOG_S = 60


def test_reader_never_sees_half_a_file(tmp_path):
    path, contents = tmp_path / "route.json", [b"a" * 100_000, b"b" * 70_000]
    files.replace(path, contents[0])
    stop, seen = threading.Event(), set()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        files.replace(path, contents[number % 2])
    stop.set()
    reader.join()

    assert seen <= set(contents)
    assert list(tmp_path.iterdir()) == [path]


def test_link_and_mode_stay(tmp_path):
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "route.json", tmp_path / "route.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)

    files.replace(link, b"new")
    files.replace(tmp_path / "first", b"new")

    assert (real.read_text(), link.is_symlink(), real.stat().st_mode & 0o777) == ("new", True, 0o640)
    assert (tmp_path / "first").stat().st_mode & 0o777 == 0o644


def test_failed_write_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "route.json"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "disk full")))

    with pytest.raises(OSError, match="disk full") as failed:
        files.replace(path, b"new")

    assert failed.value.filename == str(path)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("route.json", "old")]


def test_file_folder_and_moved_tree_reach_the_disk_in_order(tmp_path, monkeypatch):
    (tmp_path / "old" / "model").mkdir(parents=True)
    (tmp_path / "old" / "model" / "weights").write_text("w")
    synced: list[tuple[str, bool]] = []
    target = tmp_path / "new" / "model"

    def note(handle: int) -> None:
        synced.append((Path(f"/proc/self/fd/{handle}").readlink().name, target.exists()))

    monkeypatch.setattr(os, "fsync", note)

    files.move(tmp_path / "old" / "model", target)
    assert synced == [("weights", False), ("model", False), ("old", True), ("new", True)]
    synced.clear()
    files.replace(target / "weights", b"x", staging=tmp_path)
    assert synced[0][0].startswith(".weights.")
    assert synced[1:] == [("model", True)]


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
def test_lock_ends_with_its_process(tmp_path, is_folder):
    lock = f"locked_folder(p := Path({str(tmp_path)!r}))"
    if not is_folder:
        lock = f"locked_file(Path({str(tmp_path / 'log')!r}), 'x')"
    program = (
        f"from pathlib import Path\nfrom nereid.base.files import *\nwith {lock}: print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        try:
            holder.stdout.readline()
            if is_folder:
                assert files.is_locked(tmp_path)
            else:
                with pytest.raises(files.LockTimeout, match=r"log' is locked by another `nereid x`; fix: "):
                    contextlib.ExitStack().enter_context(
                        files.locked_file(tmp_path / "log", "nereid x", 0.05)
                    )
        finally:
            holder.kill()

    assert not files.is_locked(tmp_path)
    with files.locked_folder(tmp_path), files.locked_file(tmp_path / "log", "nereid x", WATCHDOG_S):
        assert files.is_locked(tmp_path)

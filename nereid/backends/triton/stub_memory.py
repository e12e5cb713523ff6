"""The shared memory of a server's stubs: private to its user, and removed even after a crash."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO

FOLDER = Path("/dev/shm")
PREFIX, LOCK = "nereid-", ".lock"


class StubMemory:
    """The regions of one server; a file with a lock shows others that the server still runs.

    Args:
        name: starts with `nereid-`; a prefix of the regions' names.
    """

    def __init__(self, name: str) -> None:
        assert name.startswith(PREFIX)
        self._name = name
        self._lock: BinaryIO | None = None
        self._changed_ns = 0

    def claim(self) -> None:
        """Hold a lock that marks the server as running; the kernel releases it on exit."""
        if self._lock:
            return
        # Locked before it has its name, so that nobody considers it stale.
        unnamed = FOLDER / f".{self._name}{LOCK}"
        self._lock = os.fdopen(os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r+b")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(FOLDER / f"{self._name}{LOCK}")

    def protect(self) -> None:
        """Make the regions private to this user; Triton creates them readable, whatever its umask."""
        for region in _regions(self._name):
            with contextlib.suppress(OSError), open(region, "rb", opener=_without_link) as file:
                os.fchmod(file.fileno(), 0o600)

    def has_changed(self) -> bool:
        """Return whether regions of any server were created or removed since the last call."""
        before, self._changed_ns = self._changed_ns, FOLDER.stat().st_mtime_ns
        return self._changed_ns != before

    def remove(self) -> None:
        """Remove all regions; the server has ended."""
        _remove(self._name)
        if self._lock:
            self._lock.close()
            self._lock = None


def remove_stale() -> list[str]:
    """Remove the regions of this user's killed servers; return the names of these servers."""
    removed = []
    for path in sorted(FOLDER.glob(f"{PREFIX}*{LOCK}")):
        with contextlib.suppress(OSError), open(path, "rb", opener=_without_link) as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                removed.append(path.name.removesuffix(LOCK))
                _remove(removed[-1])
    return removed


def _remove(name: str) -> None:
    for region in _regions(name):
        with contextlib.suppress(OSError):  # other users may create files of any name
            region.unlink()
    (FOLDER / f"{name}{LOCK}").unlink(missing_ok=True)


def _regions(name: str) -> list[Path]:
    return list(FOLDER.glob(f"{name}-*"))


def _without_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)

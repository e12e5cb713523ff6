"""Atomic file replacement, moves that survive a power failure, and locks released when a process exits."""

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from nereid.base.errors import InvalidConfig, OperationFailed

# System errors for a full disk and an exhausted quota.
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
LOCK_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.02


class LockTimeout(OperationFailed):
    """Another process holds a file's lock."""


@contextlib.contextmanager
def filename_in_errors(path: Path) -> Iterator[None]:
    """Add the file name to system errors; a failed write, such as on a full disk, does not report one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def read_regular(path: Path, max_bytes: int) -> tuple[bytes, os.stat_result]:
    """Return a regular file's content and status; a named pipe does not block.

    Raises:
        InvalidConfig: it is not a regular file, or has more than `max_bytes`.
        OSError: it cannot be read.
    """
    with open(path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
        stat_result = os.fstat(file.fileno())
        if not stat.S_ISREG(stat_result.st_mode):
            raise InvalidConfig(f"'{path}': expected a regular file")
        return read_at_most(file, max_bytes, str(path)), stat_result


def read_at_most(file: BinaryIO, max_bytes: int, name: str) -> bytes:
    """Return the content of `file`, which messages call `name`.

    Raises:
        InvalidConfig: it has more than `max_bytes`.
    """
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InvalidConfig(f"'{name}': expected at most {max_bytes:,} bytes, got more")
    return content


def replace(path: Path, content: bytes, staging: Path | None = None) -> None:
    """Replace a file atomically and durably: readers see either all of the old content or all of the new.

    If the path is a link, its target is replaced. The new file keeps the old owner and mode, or has 0644.

    Args:
        path, content: the file, whose folder must exist, and its new content.
        staging: a folder on the same filesystem for the temporary file; default: the file's own folder.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))  # unlike `resolve`, also for a loop of links
    fd, name = tempfile.mkstemp(dir=staging or target.parent, prefix=f".{target.name}.")
    try:
        with filename_in_errors(target), os.fdopen(fd, "wb") as new:
            new.write(content)
            new.flush()
            _copy_owner_and_mode(target, new.fileno())
            os.fsync(new.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync(target.parent)


def move(source: Path, target: Path) -> None:
    """Move a file or folder atomically; after a power failure it is intact, at the old or the new path.

    Raises:
        OSError: something cannot be read or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in (*source.rglob("*"), source):
        sync(path)
    source.rename(target)
    for folder in (source.parent, target.parent):
        sync(folder)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk; some filesystems do not support this for folders.

    Raises:
        OSError: the disk reports an error.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


def state_folder(repository: Path) -> Path:
    """Return a model repository's state folder, kept outside it because Triton would take it for a model."""
    real = Path(os.path.realpath(repository))
    return real.parent / f".{real.name}.nereid"


@contextlib.contextmanager
def locked_file(path: Path, holder: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[BinaryIO]:
    """Open a file for appending under an exclusive lock, which the kernel releases when the process exits.

    Args:
        path: the file; created if missing.
        holder: the command that may hold the lock, for the error message.
        timeout_s: maximum wait for the lock, in seconds.

    Raises:
        LockTimeout: another process held the lock for `timeout_s`.
        OSError: the file cannot be written.
    """
    # Unbuffered: a buffer would keep what a full disk rejects and write it later.
    with open(path, "a+b", buffering=0, opener=_without_link) as file:
        deadline = time.monotonic() + timeout_s
        while not _try_lock(file.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise LockTimeout(
                    f"'{path}' is locked by another `{holder}`; fix: try again when that command has ended"
                )
            time.sleep(POLL_INTERVAL_S)
        yield file


def _without_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Wait for an exclusive lock on a folder, which the kernel releases when the process exits.

    Raises:
        OSError: the folder cannot be read.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def is_locked(path: Path) -> bool:
    """Return whether any process holds an exclusive lock on a file or folder.

    Raises:
        OSError: it cannot be read.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        return not _try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _copy_owner_and_mode(target: Path, fd: int) -> None:
    try:
        before = target.stat()
    except FileNotFoundError:
        os.fchmod(fd, 0o644)
        return
    with contextlib.suppress(PermissionError):  # only root may change an owner
        os.fchown(fd, before.st_uid, before.st_gid)
    os.fchmod(fd, before.st_mode & 0o777)

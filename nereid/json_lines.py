"""Files of JSON lines that are only ever added to, and that lock whatever they are about.

The kernel lets go of the lock however a writer ends; a line that one was killed in is skipped by readers.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from pwd import getpwuid
from typing import BinaryIO, TypeVar

import msgspec

from nereid.errors import OperationFailed

LOCK_S = 5.0

Kind = TypeVar("Kind")
Line = TypeVar("Line", bound=msgspec.Struct)


class Held(OperationFailed):
    """Another one holds the lock of a file."""


def read(path: Path, kind: type[Line]) -> tuple[Line, ...]:
    """Return the lines, oldest first; those that are damaged are left out."""
    return tuple(parsed for line in _lines(path) if (parsed := _parse(line, kind)) is not None)


def read_all(path: Path, kind: type[Line]) -> tuple[Line, ...]:
    """Return the lines, oldest first; only those that a writer was killed in, no JSON, are left out.

    Raises:
        OperationFailed: a line is of another kind.
    """
    for number, line in enumerate(_lines(path), start=1):
        if _parse(line, kind) is None and _parse(line, dict) is not None:
            raise OperationFailed(
                f"line {number} of '{path}' cannot be read, it is of another release; "
                "fix: see what it was about, then move the file away"
            )
    return read(path, kind)


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def locked(path: Path, who: str, wait_s: float = LOCK_S) -> Iterator[BinaryIO]:
    """Open the file for `append`; inside, nobody else has it open so.

    Args:
        who: what else may hold it, for the message.

    Raises:
        Held: another one has been writing for `wait_s`.
        OSError: the file cannot be written.
    """
    with path.open("a+b") as file:
        deadline = time.monotonic() + wait_s
        while not _lock(file):
            if time.monotonic() > deadline:
                raise Held(f"another `{who}` holds '{path}'; fix: try again when it is done")
            time.sleep(0.02)
        yield file


def append(file: BinaryIO, line: msgspec.Struct) -> None:
    """Write one line, so that it outlives the machine's next moment; a line cut off before it is ended."""
    size = file.seek(0, os.SEEK_END)
    is_cut_off = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
    file.write(b"\n" * is_cut_off + msgspec.json.encode(line) + b"\n")
    file.flush()
    os.fsync(file.fileno())


def user_name(user_id: int) -> str:
    """Return a user's name, or the number of one that has none, as in a container."""
    try:
        return getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def _parse(line: bytes, kind: type[Kind]) -> Kind | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

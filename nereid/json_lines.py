"""Append-only files of JSON lines: journals and histories that survive a killed writer."""

import os
from pathlib import Path
from pwd import getpwuid
from typing import BinaryIO, TypeVar

import msgspec

from nereid import files
from nereid.errors import OperationFailed

Kind = TypeVar("Kind")
Line = TypeVar("Line", bound=msgspec.Struct)


def read(path: Path, kind: type[Line]) -> tuple[Line, ...]:
    """Return the lines, oldest first, without the damaged ones; a missing file has no lines."""
    return tuple(parsed for line in _lines(path) if (parsed := _parse(line, kind)) is not None)


def read_all(path: Path, kind: type[Line]) -> tuple[Line, ...]:
    """Return the lines, oldest first, without those that a killed writer left incomplete.

    Raises:
        OperationFailed: a line is JSON, but not of this kind.
    """
    for number, line in enumerate(_lines(path), start=1):
        if _parse(line, kind) is None and _parse(line, dict) is not None:
            raise OperationFailed(
                f"cannot read line {number} of '{path}': another release of nereid wrote it; "
                "fix: finish with that release, or check the repository and move the file away"
            )
    return read(path, kind)


def append(file: BinaryIO, line: msgspec.Struct) -> None:
    """Append one line durably to a locked file, after the end of an incomplete last line.

    Raises:
        OSError: the line cannot be written.
    """
    size = file.seek(0, os.SEEK_END)
    is_incomplete = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
    with files.naming(Path(file.name)):
        left = memoryview(b"\n" * is_incomplete + msgspec.json.encode(line) + b"\n")
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def user_name(user_id: int) -> str:
    """Return the name of a user, or the user's number if the system has no name, as in a container."""
    try:
        return getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        return []


def _parse(line: bytes, kind: type[Kind]) -> Kind | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None

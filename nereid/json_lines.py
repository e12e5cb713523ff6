"""Append-only files of JSON lines: journals and histories that survive a killed writer and damage."""

import os
import re
from pathlib import Path
from pwd import getpwuid
from typing import BinaryIO, TypeVar
from zlib import crc32

import msgspec

from nereid import files
from nereid.errors import OperationFailed

Kind = TypeVar("Kind")
Line = TypeVar("Line", bound=msgspec.Struct)
# The last key of each object: the checksum of the object without it.
CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"}\n?$')


def read(path: Path, kind: type[Line]) -> tuple[Line, ...]:
    """Return the lines, oldest first, without the damaged ones; a missing file has no lines."""
    found = (_parse(line, kind) for line in _lines(path) if not _is_changed(line))
    return tuple(line for line in found if line is not None)


def read_all(path: Path, kind: type[Line]) -> tuple[Line, ...]:
    """Return the lines, oldest first, without those that a killed writer left incomplete.

    Damaged lines before the last one are left out, too: see `note_on_damage`.

    Raises:
        OperationFailed: a line is JSON, but not of this kind, or the last line is damaged.
    """
    lines = _lines(path)
    for number, line in enumerate(lines, start=1):
        if not _is_changed(line) and _parse(line, kind) is None and _parse(line, dict) is not None:
            raise OperationFailed(
                f"cannot read line {number} of '{path}': another release of nereid wrote it; "
                "fix: finish with that release, or check the repository and move the file away"
            )
    last = max((number for number, line in enumerate(lines) if line.strip()), default=None)
    if last is not None and _is_damaged(lines[last]):
        raise OperationFailed(
            f"line {last + 1} of '{path}' is damaged, and with it the end of the last change; "
            "fix: nereid check, repair the repository if that is needed, then remove this line"
        )
    return read(path, kind)


def note_on_damage(path: Path) -> str:
    """Return a note on the damaged lines before the last one, empty without any."""
    lines = _lines(path)[:-1]
    found = ", ".join(str(number) for number, line in enumerate(lines, start=1) if _is_damaged(line))
    return f"note: damaged lines of '{path}' are ignored: {found}; fix: remove them" if found else ""


def append(file: BinaryIO, line: msgspec.Struct) -> None:
    """Append one line durably to a locked file, after the end of an incomplete last line.

    Raises:
        OSError: the line cannot be written.
    """
    size = file.seek(0, os.SEEK_END)
    is_incomplete = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
    with files.naming(Path(file.name)):
        left = memoryview(b"\n" * is_incomplete + _with_checksum(msgspec.json.encode(line)) + b"\n")
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
        return path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _with_checksum(text: bytes) -> bytes:
    return text[:-1] + f',"crc32":"{crc32(text):08x}"}}'.encode()


def _is_changed(line: bytes) -> bool:
    """Return whether a line differs from its checksum; earlier releases wrote none."""
    found = CHECKSUM.search(line)
    return found is not None and crc32(line[: found.start()] + b"}") != int(found[1], 16)


def _is_damaged(line: bytes) -> bool:
    """Return whether a line is neither whole nor the beginning of one, as a killed writer leaves it."""
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        is_beginning = "truncated" in str(error) and not line.endswith(b"}\n")
        return bool(line.strip()) and not is_beginning
    return _is_changed(line)


def _parse(line: bytes, kind: type[Kind]) -> Kind | None:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None

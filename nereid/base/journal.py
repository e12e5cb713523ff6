"""Journals: append-only JSON-lines files of one entry type that survive killed writers and damage."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from pwd import getpwuid
from typing import BinaryIO, Generic, TypeVar
from zlib import crc32

import msgspec

from nereid.base import files
from nereid.base.errors import OperationFailed

Entry = TypeVar("Entry", bound=msgspec.Struct)
Append = Callable[[Entry], None]
# The last key of each object: a checksum of the rest of the object.
CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"}\n?$')


class _Fault(Enum):
    """Why a line has no entry: it is incomplete, was altered, or was written by another release."""

    INCOMPLETE, DAMAGED, FOREIGN = auto(), auto(), auto()


@dataclass(frozen=True, slots=True)
class Journal(Generic[Entry]):
    """An append-only file of JSON lines; a missing file has no entries.

    Attributes:
        path, kind: the file and the class of its entries.
        holder: the command that may hold the lock, for the error message.
    """

    path: Path
    kind: type[Entry]
    holder: str

    def read(self) -> tuple[Entry, ...]:
        """Return the entries, oldest first, skipping any that a killed writer left incomplete.

        Damaged lines before the last one are skipped too; see `note_on_damage`.

        Raises:
            OperationFailed: a line is JSON but not an entry of this kind, or the last line is damaged.
        """
        lines = self._lines()
        for number, line in lines.items():
            if line is _Fault.FOREIGN:
                raise OperationFailed(
                    f"cannot read line {number} of '{self.path}': another release of nereid wrote it; "
                    "fix: finish with that release, or check the repository and move the file away"
                )
        last_number = max(lines, default=0)
        if last_number and lines[last_number] is _Fault.DAMAGED:
            raise OperationFailed(
                f"line {last_number} of '{self.path}' is damaged, so the last change may be incomplete; "
                "fix: nereid check, repair the repository if that is needed, then remove this line"
            )
        return _entries(lines)

    def read_intact(self) -> tuple[Entry, ...]:
        """Return the readable entries, oldest first."""
        return _entries(self._lines())

    def note_on_damage(self) -> str:
        """Return a note about damaged lines before the last one, or an empty string."""
        earlier = [*self._lines().items()][:-1]
        damaged = ", ".join(str(number) for number, line in earlier if line is _Fault.DAMAGED)
        note = f"note: damaged lines of '{self.path}' are ignored: {damaged}; fix: remove them"
        return note if damaged else ""

    @contextmanager
    def locked(self, timeout_s: float = files.LOCK_TIMEOUT_S) -> Iterator[Append[Entry]]:
        """Hold the file's lock, creating the file if missing, and yield a function that appends entries.

        When that function returns, the entry is on disk, on its own line even after an incomplete last line.
        It raises `OSError` if the entry cannot be written.

        Raises:
            LockTimeout: another process held the lock for `timeout_s`.
            OSError: the file cannot be written.
        """
        with files.locked_file(self.path, self.holder, timeout_s) as file:
            yield partial(_append, file)

    def _lines(self) -> dict[int, Entry | _Fault]:
        """Map each non-empty line's number to its entry or fault."""
        try:
            lines = self.path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return {}
        return {n: _parse(line, self.kind) for n, line in enumerate(lines, start=1) if line.strip()}


def user_name(user_id: int) -> str:
    """Return a user's name, or the numeric id if the system has no name for it, as in a container."""
    try:
        return getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def _entries(lines: dict[int, Entry | _Fault]) -> tuple[Entry, ...]:
    return tuple(line for line in lines.values() if not isinstance(line, _Fault))


def _append(file: BinaryIO, entry: msgspec.Struct) -> None:
    text, size = msgspec.json.encode(entry), file.seek(0, os.SEEK_END)
    is_incomplete = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
    line = b"\n" * is_incomplete + text[:-1] + f',"crc32":"{crc32(text):08x}"}}\n'.encode()
    with files.filename_in_errors(Path(file.name)):
        left = memoryview(line)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
        if not size:
            files.sync(Path(file.name).parent)


def _parse(line: bytes, kind: type[Entry]) -> Entry | _Fault:
    try:
        is_object = isinstance(msgspec.json.decode(line), dict)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        is_beginning = "truncated" in str(error) and not line.endswith(b"}\n")
        return _Fault.INCOMPLETE if is_beginning else _Fault.DAMAGED
    checksum = CHECKSUM.search(line)  # earlier releases wrote none
    is_whole = not checksum or crc32(line[: checksum.start()] + b"}") == int(checksum[1], 16)
    if not (is_object and is_whole):
        return _Fault.DAMAGED
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.ValidationError:
        return _Fault.FOREIGN

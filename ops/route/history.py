"""The history of a route file: every content it had, one JSON line each, in a file beside it.

The history is also the lock of all that write the route file. The kernel lets go of it however a writer
ends; a line that one was killed in is skipped.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from pwd import getpwuid
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta, Raw, Struct

from ops.cli import CommandFailed
from python_backend.errors import InvalidConfig
from python_backend.routing import Route, parse_route

LOCK_S = 5.0
FIRST_SEEN, BY_HAND = "first seen", "edited by hand"


class Entry(Struct, frozen=True):
    """One content of the route file: since when, by whom, why, its SHA-256, and the whole of it.

    `route` is JSON: the document, or a string with the file's text if that is no JSON at all.
    """

    time: Annotated[datetime, Meta(tz=True)]
    user: str
    generation: int
    sha256: str
    note: str
    route: Raw

    def parsed(self) -> Route | None:
        """Return the route, or None if the file was none, which only an edit by hand can make it."""
        try:
            return parse_route(bytes(self.route))
        except InvalidConfig:
            return None


def path_beside(route_file: Path) -> Path:
    """Return where the history of a route file lies."""
    return route_file.with_suffix(".history.jsonl")


def read(path: Path) -> tuple[Entry, ...]:
    """Return the entries, oldest first; lines that are damaged are left out."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return ()
    return tuple(entry for line in lines if (entry := _entry(line)))


@contextlib.contextmanager
def locked(path: Path, wait_s: float = LOCK_S) -> Iterator[BinaryIO]:
    """Open the history for `append`; inside, nobody else is.

    Raises:
        CommandFailed: another one has been writing for `wait_s`.
        OSError: the history cannot be written.
    """
    with path.open("a+b") as file:
        deadline = time.monotonic() + wait_s
        while not _lock(file):
            if time.monotonic() > deadline:
                raise CommandFailed(f"another `nereid route` holds '{path}'; mend: try again when it is done")
            time.sleep(0.02)
        yield file


def append(file: BinaryIO, entry: Entry) -> None:
    """Write one line, so that it outlives the machine's next moment; a line cut off before it is ended."""
    size = file.seek(0, os.SEEK_END)
    is_cut_off = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
    file.write(b"\n" * is_cut_off + msgspec.json.encode(entry) + b"\n")
    file.flush()
    os.fsync(file.fileno())


def make_entry(text: bytes, note: str, generation: int, when: datetime, user_id: int) -> Entry:
    """Describe the content `text` of a route file."""
    return Entry(when, user_name(user_id), generation, sha256(text).hexdigest(), note, _document(text))


def unrecorded(entries: Sequence[Entry], text: bytes, status: os.stat_result) -> Entry | None:
    """Return the entry that is missing for the file's present content, if it is not the last one's.

    Args:
        entries: the history.
        text: what the file holds.
        status: of the file: its owner and time stand for who wrote it, and when.
    """
    if entries and entries[-1].sha256 == sha256(text).hexdigest():
        return None
    try:
        generation = parse_route(text).generation
    except InvalidConfig:
        generation = entries[-1].generation if entries else 0
    note = BY_HAND if entries else FIRST_SEEN
    return make_entry(text, note, generation, datetime.fromtimestamp(status.st_mtime, UTC), status.st_uid)


def user_name(user_id: int) -> str:
    """Return a user's name, or the number of one that has none, as in a container."""
    try:
        return getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


def _entry(line: bytes) -> Entry | None:
    try:
        return msgspec.json.decode(line, type=Entry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _document(text: bytes) -> Raw:
    try:
        return Raw(msgspec.json.encode(msgspec.json.decode(text)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Raw(msgspec.json.encode(text.decode(errors="replace")))

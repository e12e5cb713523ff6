"""The history of a route file: every content it had, one JSON line each, in a file beside it.

The history is also the lock of all that write the route file.
"""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta, Raw, Struct

from nereid import files, json_lines
from nereid.routing.assignment import Route, parse_route
from nereid.serving_errors import InvalidConfig

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
    return json_lines.read(path, Entry)


def locked(path: Path, wait_s: float = files.LOCK_TIMEOUT_S) -> AbstractContextManager[BinaryIO]:
    """Open the history for `json_lines.append`; inside, nobody else writes it or the route file.

    Raises:
        OperationFailed: another one has been writing for `wait_s`.
        OSError: the history cannot be written.
    """
    return files.locked_file(path, "nereid route", wait_s)


def make_entry(text: bytes, note: str, generation: int, when: datetime, user_id: int) -> Entry:
    """Describe the content `text` of a route file."""
    return Entry(
        when, json_lines.user_name(user_id), generation, sha256(text).hexdigest(), note, _document(text)
    )


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


def _document(text: bytes) -> Raw:
    try:
        return Raw(msgspec.json.encode(msgspec.json.decode(text)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Raw(msgspec.json.encode(text.decode(errors="replace")))

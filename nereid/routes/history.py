"""History of a route file: every content it has had, as JSON lines in a file next to it.

Its lock is also the lock for changes of the route file.
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from nereid import json_lines
from nereid.routing.assignment import Route, parse_route
from nereid.serving_errors import InvalidConfig

FIRST_SEEN, BY_HAND = "first seen", "edited by hand"


class Entry(Struct, frozen=True):
    """One content of the route file, with its time, user, reason and SHA-256.

    `route` is JSON: the document, or a string with the file's text if the text is not JSON.
    """

    time: Annotated[datetime, Meta(tz=True)]
    user: str
    generation: int
    sha256: str
    note: str
    route: Raw

    def parsed(self) -> Route | None:
        """Return the route, None if the content was invalid, as after an edit by hand."""
        try:
            return parse_route(bytes(self.route))
        except InvalidConfig:
            return None


def path_of(route_file: Path) -> Path:
    """Return the path of a route file's history."""
    return route_file.with_suffix(".history.jsonl")


def make_entry(text: bytes, note: str, generation: int, when: datetime, user_id: int) -> Entry:
    """Return the entry for the content `text` of a route file."""
    return Entry(
        when, json_lines.user_name(user_id), generation, sha256(text).hexdigest(), note, _document(text)
    )


def unrecorded(entries: Sequence[Entry], text: bytes, status: os.stat_result) -> Entry | None:
    """Return the entry that the history lacks for the file's content; None if the last entry has it.

    The owner and time in the file's `status` become those of the entry.
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

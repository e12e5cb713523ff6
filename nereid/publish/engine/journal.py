"""Journal of a repository: every change is written there first, so that a later command can finish it.

The journal and the staged files are in a folder next to the repository, on the same filesystem: Triton takes
every folder inside the repository for a model. The file is also the lock of the set of models.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from msgspec import Meta, Struct

from nereid import files, json_lines
from nereid.errors import OperationFailed
from nereid.publish.engine.actions import Action
from nereid.units import escaped

Kind = Literal["add", "publish", "retire", "remove"]
# Up to `commit` the repository is unchanged. From `commit` on the actions are done, from `undo` on undone.
Event = Literal["begin", "commit", "undo", "done", "undone"]
FINISHED = frozenset({"done", "undone"})
# Operations that free space. They must be possible on a full disk, so some space is kept for their files.
FREEING = frozenset({"retire", "remove"})
RESERVE, RESERVE_BYTES = "reserve", 2**17


class Operation(Struct, frozen=True):
    """One change of the repository; `actions` are known from the event `commit` on."""

    id: str
    kind: Kind
    model: str
    version: int
    user: str
    actions: tuple[Action, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.model} {self.version}"


class Line(Struct, frozen=True):
    """One event of an operation, with the whole operation as it was then."""

    time: Annotated[datetime, Meta(tz=True)]
    event: Event
    operation: Operation
    note: str = ""


@dataclass(frozen=True, slots=True)
class Journal:
    """The journal of a repository, locked and open for writing."""

    folder: Path
    file: BinaryIO

    @property
    def path(self) -> Path:
        """The path of the file."""
        return self.folder / "journal.jsonl"

    def staging(self, operation: Operation) -> Path:
        """Return the folder for the staged and the removed files of an operation."""
        return self.folder / operation.id

    def write(self, event: Event, operation: Operation, note: str = "") -> None:
        """Append an event; the staged files of a finished operation are removed."""
        if operation.kind in FREEING:
            (self.folder / RESERVE).unlink(missing_ok=True)
        if event in FINISHED and not operation.actions:
            # Before the line, as the files may fill the disk; without actions, they are not needed to undo.
            shutil.rmtree(self.staging(operation), ignore_errors=True)
        json_lines.append(self.file, Line(datetime.now(UTC), event, operation, escaped(note)))
        if event in FINISHED:
            shutil.rmtree(self.staging(operation), ignore_errors=True)

    def lines(self) -> tuple[Line, ...]:
        """Return all events, oldest first.

        Raises:
            OperationFailed: an event has an unknown format, or the last one is damaged, so that unfinished
                work may be hidden.
        """
        return json_lines.read_all(self.path, Line)

    def note_on_damage(self) -> str:
        """Return a note on damaged lines that are ignored, empty without any."""
        return json_lines.note_on_damage(self.path)

    def unfinished(self) -> Line | None:
        """Return the last event of an unfinished operation, None if all are finished."""
        lines = self.lines()
        return lines[-1] if lines and lines[-1].event not in FINISHED else None


@contextlib.contextmanager
def opened(repository: Path, timeout_s: float = files.LOCK_TIMEOUT_S) -> Iterator[Journal]:
    """Open a repository's journal under its lock: no other command changes the set of models meanwhile.

    Raises:
        OperationFailed: another command holds the lock, or staged files could not be renamed.
        OSError: the journal cannot be written.
    """
    folder = files.state_folder(repository)
    parent = folder.parent
    if parent.stat().st_dev != repository.stat().st_dev:
        raise OperationFailed(
            f"cannot stage files for '{repository}': it is a mount point, and files outside cannot be "
            "renamed into it; fix: move the repository into a folder of that mount"
        )
    folder.mkdir(exist_ok=True)
    with files.locked_file(folder / "journal.jsonl", "nereid publish", timeout_s) as file:
        try:
            yield Journal(folder, file)
        finally:
            _reserve(folder / RESERVE)


def _reserve(path: Path) -> None:
    """Take the space for operations on a full disk, as far as there is any."""
    with contextlib.suppress(OSError):
        if not path.exists() or path.stat().st_size < RESERVE_BYTES:
            path.write_bytes(os.urandom(RESERVE_BYTES))  # a file system may compress zeros

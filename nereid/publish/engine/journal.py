"""What is being done to a repository, written down before it is done, so that a kill can be made good.

It lies in a folder beside the repository, on the same filesystem, together with what is staged: inside it,
Triton would take the folder for a model. Its file is also the lock of all that change the set of models.
"""

import contextlib
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

Kind = Literal["add", "publish", "retire"]
# Up to `commit` nothing in the repository has changed; from then on the actions are to be done, or, from
# `undo` on, to be taken back.
Event = Literal["begin", "commit", "undo", "done", "undone"]
FINISHED = frozenset({"done", "undone"})


class Operation(Struct, frozen=True):
    """One change of the repository; `actions` are known from `commit` on."""

    id: str
    kind: Kind
    model: str
    version: int
    user: str
    actions: tuple[Action, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.model} {self.version}"

    @property
    def taken_back(self) -> "Event":
        """What has happened when all actions are taken back, which is what retiring is for."""
        return "done" if self.kind == "retire" else "undone"


class Line(Struct, frozen=True):
    """One event of an operation, and the whole of the operation as it was then."""

    time: Annotated[datetime, Meta(tz=True)]
    event: Event
    operation: Operation
    note: str = ""


@dataclass(frozen=True, slots=True)
class Journal:
    """The journal of a repository, locked and open for writing."""

    folder: Path
    file: BinaryIO

    def staging(self, operation: Operation) -> Path:
        """Return the folder of what an operation has staged, and of what it has put away."""
        return self.folder / operation.id

    def write(self, event: Event, operation: Operation, note: str = "") -> None:
        """Write an event down; what it has staged is removed when an operation is finished."""
        if event in FINISHED and not operation.actions:
            # First, as the disk may be full of it; nothing of it is needed to take nothing back.
            shutil.rmtree(self.staging(operation), ignore_errors=True)
        json_lines.append(self.file, Line(datetime.now(UTC), event, operation, note))
        if event in FINISHED:
            shutil.rmtree(self.staging(operation), ignore_errors=True)

    def lines(self) -> tuple[Line, ...]:
        """Return all events, oldest first."""
        return read(self.folder)

    def unfinished(self) -> Line | None:
        """Return the last event of the operation that was not finished, if there is one."""
        lines = self.lines()
        return lines[-1] if lines and lines[-1].event not in FINISHED else None


@contextlib.contextmanager
def opened(repository: Path, timeout_s: float = files.LOCK_TIMEOUT_S) -> Iterator[Journal]:
    """Open a repository's journal; inside, nobody else changes its set of models.

    Raises:
        OperationFailed: somebody else does, or nothing can be staged beside the repository.
        OSError: the journal cannot be written.
    """
    folder = folder_of(repository)
    parent = folder.parent
    if parent.stat().st_dev != repository.stat().st_dev:
        raise OperationFailed(
            f"{repository} is a mount of its own, so that nothing staged beside it can be renamed into it; "
            "fix: keep the repository in a folder of that mount"
        )
    folder.mkdir(exist_ok=True)
    with files.locked_file(folder / "journal.jsonl", "nereid publish", timeout_s) as file:
        yield Journal(folder, file)


def read(folder: Path) -> tuple[Line, ...]:
    """Return all events of a journal, oldest first.

    Raises:
        OperationFailed: one cannot be read, so that nobody knows what is left to be done.
    """
    return json_lines.read_all(folder / "journal.jsonl", Line)


def folder_of(repository: Path) -> Path:
    """Return the folder of a repository's journal."""
    real = repository.resolve()
    return real.parent / f".{real.name}.nereid"

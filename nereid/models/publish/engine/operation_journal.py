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
from typing import Annotated, Literal

from msgspec import Meta, Struct

from nereid.base import files
from nereid.base.errors import OperationFailed
from nereid.base.journal import Append, Journal
from nereid.base.units import escaped
from nereid.models.publish.engine.actions import Action

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


class PublishStep(Struct, frozen=True):
    """One event of an operation, with the whole operation as it was then."""

    time: Annotated[datetime, Meta(tz=True)]
    event: Event
    operation: Operation
    note: str = ""


@dataclass(frozen=True, slots=True)
class OperationJournal:
    """The journal of a repository, locked; `append` adds a step to `steps`."""

    folder: Path
    steps: Journal[PublishStep]
    append: Append[PublishStep]

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
        self.append(PublishStep(datetime.now(UTC), event, operation, escaped(note)))
        if event in FINISHED:
            shutil.rmtree(self.staging(operation), ignore_errors=True)

    def unfinished(self) -> PublishStep | None:
        """Return the last step of an unfinished operation, None if all are finished.

        Raises:
            OperationFailed: a step has an unknown format, or the last one is damaged, so that unfinished
                work may be hidden.
        """
        steps = self.steps.read()
        return steps[-1] if steps and steps[-1].event not in FINISHED else None


@contextlib.contextmanager
def opened(repository: Path, timeout_s: float = files.LOCK_TIMEOUT_S) -> Iterator[OperationJournal]:
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
    steps = Journal(folder / "journal.jsonl", PublishStep, "nereid publish")
    with steps.locked(timeout_s) as append:
        try:
            yield OperationJournal(folder, steps, append)
        finally:
            _reserve(folder / RESERVE)


def _reserve(path: Path) -> None:
    """Take the space for operations on a full disk, as far as there is any."""
    with contextlib.suppress(OSError):
        if not path.exists() or path.stat().st_size < RESERVE_BYTES:
            path.write_bytes(os.urandom(RESERVE_BYTES))  # a file system may compress zeros

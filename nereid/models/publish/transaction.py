"""Changes to a repository that are completed or undone, even after a kill or an error.

Every change is first written to the repository's journal, so that a later command can finish it. The journal
and the staged files are in a folder next to the repository, on the same filesystem: Triton takes every folder
inside the repository for a model. The file is also the lock for the set of models.
"""

import contextlib
import dataclasses
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from nereid.base import files
from nereid.base.errors import OperationFailed
from nereid.base.journal import Append, Journal, user_name
from nereid.base.units import escaped
from nereid.models.publish.actions import Action, VariantInUse, Workspace
from nereid.server.model_control import NotReached
from nereid.server.run_dir import ServerInfo

EXPLICIT = "explicit"
Kind = Literal["add", "publish", "retire", "remove"]
# Up to `commit` the repository is unchanged. From `commit` on the actions are done, from `undo` on undone.
Event = Literal["begin", "commit", "undo", "done", "undone"]
FINISHED = frozenset({"done", "undone"})
# Operations that free space. They must be possible on a full disk, so some space is kept for their files.
FREEING = frozenset({"retire", "remove"})
RESERVE, RESERVE_BYTES = "reserve", 2**17


class RepositoryOperation(Struct, frozen=True):
    """One change of the repository; `actions` are known from the event `commit` on.

    This is a file format: earlier releases did not write newer fields, so those need a default.
    """

    id: str
    kind: Kind
    model: str
    version: int
    user: str
    actions: tuple[Action, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.model} {self.version}"


class OperationEvent(Struct, frozen=True):
    """One event of an operation, with the state of the whole operation at that time."""

    time: Annotated[datetime, Meta(tz=True)]
    event: Event
    operation: RepositoryOperation
    note: str = ""


class StagedOperation(NamedTuple):
    """An operation that has begun, and a workspace with its own staging folder."""

    operation: RepositoryOperation
    workspace: Workspace


@dataclass(frozen=True, slots=True)
class LockedRepository:
    """A repository whose journal is locked; `append` adds one to `events`.

    The staging folder of `workspace` is the journal's: each operation has its own inside it.
    """

    events: Journal[OperationEvent]
    append: Append[OperationEvent]
    workspace: Workspace

    def write(self, event: Event, operation: RepositoryOperation, note: str = "") -> None:
        """Append an event; the staged files of a finished operation are removed."""
        folder = self.workspace.staging
        if operation.kind in FREEING:
            (folder / RESERVE).unlink(missing_ok=True)
        if event in FINISHED and not operation.actions:
            # Before the line, because the files may fill the disk; without actions, no undo needs them.
            shutil.rmtree(folder / operation.id, ignore_errors=True)
        self.append(OperationEvent(datetime.now(UTC), event, operation, escaped(note)))
        if event in FINISHED:
            shutil.rmtree(folder / operation.id, ignore_errors=True)

    def unfinished(self) -> OperationEvent | None:
        """Return the last step of an unfinished operation, None if all are finished.

        Raises:
            OperationFailed: a step has an unknown format, or the last one is damaged, so that unfinished
                work may be hidden.
        """
        steps = self.events.read()
        return steps[-1] if steps and steps[-1].event not in FINISHED else None

    def begin(self, kind: Kind, model: str, version: int) -> StagedOperation:
        """Write the start of an operation to the journal."""
        operation = RepositoryOperation(secrets.token_hex(8), kind, model, version, user_name(os.getuid()))
        self.write("begin", operation)
        return self._staged(operation)

    @contextlib.contextmanager
    def preparation(self, kind: Kind, model: str, version: int) -> Iterator[StagedOperation]:
        """Begin an operation whose files are staged inside the context; an error there ends it."""
        staged = self.begin(kind, model, version)
        try:
            yield staged
        except BaseException as error:
            self.write("undone", staged.operation, str(error))
            raise

    def commit(self, staged: StagedOperation, actions: tuple[Action, ...]) -> None:
        """Carry out the actions of an operation; if one fails, undo all of them.

        Raises:
            OperationFailed: an action failed, and all are undone; `NotReached`: the server has gone away.
        """
        operation, workspace = replace(staged.operation, actions=actions), staged.workspace
        self.write("commit", operation)
        try:
            for action in actions:
                action.do(workspace)
        except NotReached:
            raise
        except Exception as error:
            self.write("undo", operation, str(error))
            workspace.report(f"failed, undoing all steps: {error}")
            self._undo(StagedOperation(operation, workspace), str(error))
            raise OperationFailed(f"'{operation}' failed and was undone: {error}") from error
        except KeyboardInterrupt:
            workspace.report(
                f"'{operation}' was interrupted; the next publish, add, retire or remove finishes it"
            )
            raise
        self.write("done", operation)

    def undo_earlier(self, kind: Kind, model: str, version: int, actions: tuple[Action, ...]) -> None:
        """Undo actions that an earlier operation has done.

        Raises:
            VariantInUse: a variant to be removed receives requests; a version to be retired then stays.
            OperationFailed: the server refuses.
        """
        operation, workspace = self.begin(kind, model, version)
        operation = replace(operation, actions=actions)
        self.write("undo", operation)
        self._undo(StagedOperation(operation, workspace))

    def recover(self) -> None:
        """Finish or undo the operation of a killed command; OperationFailed if neither is possible now."""
        if not (step := self.unfinished()):
            return
        operation, report = step.operation, self.workspace.report
        staged = self._staged(operation)
        report(f"recovery: '{operation}' of {step.time:%Y-%m-%d %H:%M:%S} UTC was not finished")
        try:
            if step.event == "begin":
                self.write("undone", operation, "recovered")
            elif step.event == "commit":
                self.commit(staged, operation.actions)
            else:
                self._undo(staged, step.note)
        except OperationFailed as error:
            if self.unfinished():
                raise
            report(str(error))
        report(f"recovery: '{operation}' is {self.events.read()[-1].event}")

    def _undo(self, staged: StagedOperation, note: str = "") -> None:
        operation, workspace = staged
        try:
            for action in reversed(operation.actions):
                action.undo(workspace)
        except VariantInUse as error:
            # Variants are removed first, so nothing is missing yet.
            if operation.kind == "retire":
                self.write("undone", operation, str(error))
            raise
        # Retiring a version undoes its publication, and removing a model undoes its addition.
        self.write("done" if operation.kind in FREEING else "undone", operation, note)

    def _staged(self, operation: RepositoryOperation) -> StagedOperation:
        staging = self.workspace.staging / operation.id
        staging.mkdir(exist_ok=True)
        return StagedOperation(operation, dataclasses.replace(self.workspace, staging=staging))


@contextlib.contextmanager
def opened_journal(
    repository: Path, server_info: ServerInfo | None = None, report: Callable[[str], None] = print
) -> Iterator[LockedRepository]:
    """Open a repository's journal under its lock: no other command can change the set of models.

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
    events = Journal(folder / "journal.jsonl", OperationEvent, "nereid publish")
    with events.locked() as append:
        try:
            yield LockedRepository(events, append, Workspace(repository, folder, server_info, report))
        finally:
            _reserve(folder / RESERVE)


def _reserve(path: Path) -> None:
    """Reserve space for operations on a full disk, as far as possible."""
    with contextlib.suppress(OSError):
        if not path.exists() or path.stat().st_size < RESERVE_BYTES:
            path.write_bytes(os.urandom(RESERVE_BYTES))  # a file system may compress zeros


@contextlib.contextmanager
def locked_repository(
    repository: Path, server_info: ServerInfo | None, report: Callable[[str], None]
) -> Iterator[LockedRepository]:
    """Hold the repository's journal and lock; first finish or undo the operation of a killed command.

    Raises:
        OperationFailed: another command holds the lock, the recovery is not possible now, or the server does
            not accept load requests.
    """
    repository = Path(os.path.realpath(repository))
    if server_info and server_info.model_control_mode != EXPLICIT:
        raise OperationFailed(
            f"cannot load models: expected a server with --model-control-mode {EXPLICIT}, got "
            f"{server_info.model_control_mode}; fix: nereid serve without that option, or stop the server "
            "first"
        )
    with opened_journal(repository, server_info, report) as locked:
        if note := locked.events.note_on_damage():
            report(note)
        locked.recover()
        yield locked

"""Changes of a repository that are completed or undone, also after a kill or an error."""

import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from nereid.base.errors import OperationFailed
from nereid.base.journal import user_name
from nereid.models.publish.engine import operation_journal
from nereid.models.publish.engine.actions import Action, Workspace
from nereid.models.publish.engine.operation_journal import Kind, Operation, OperationJournal
from nereid.models.publish.engine.variants import VariantInUse
from nereid.server.control import NotReached
from nereid.server.run_dir import ServerRecord

EXPLICIT = "explicit"


@contextmanager
def locked_repository(
    repository: Path, record: ServerRecord | None, report: Callable[[str], None]
) -> Iterator[tuple[OperationJournal, Workspace]]:
    """Hold the repository's journal and lock; first finish or undo the operation of a killed command.

    Raises:
        OperationFailed: another command holds the lock, the recovery is not possible now, or the server does
            not accept load requests.
    """
    repository = repository.resolve()
    if record and record.model_control_mode != EXPLICIT:
        raise OperationFailed(
            f"cannot load models: expected a server with --model-control-mode {EXPLICIT}, got "
            f"{record.model_control_mode}; fix: nereid serve without that option, or stop the server first"
        )
    with operation_journal.opened(repository) as log:
        workspace = Workspace(repository, log.folder, record, report)
        if note := log.steps.note_on_damage():
            report(note)
        recover(log, workspace)
        yield log, workspace


def recover(log: OperationJournal, workspace: Workspace) -> None:
    """Finish or undo the operation of a killed command.

    Raises:
        OperationFailed: neither is possible now.
    """
    if not (step := log.unfinished()):
        return
    operation = step.operation
    workspace = _with_staging(workspace, log, operation)
    workspace.report(f"recovery: '{operation}' of {step.time:%Y-%m-%d %H:%M:%S} UTC was not finished")
    try:
        if step.event == "begin":
            log.write("undone", operation, "recovered")
        elif step.event == "commit":
            commit(log, operation, workspace)
        else:
            undo(log, operation, workspace, step.note)
    except OperationFailed as error:
        if log.unfinished():
            raise
        workspace.report(str(error))
    workspace.report(f"recovery: '{operation}' is {log.steps.read()[-1].event}")


def commit(log: OperationJournal, operation: Operation, workspace: Workspace) -> None:
    """Do the actions of an operation; if one fails, undo all of them.

    Raises:
        OperationFailed: an action failed, and all are undone; `NotReached`: the server has gone away.
    """
    log.write("commit", operation)
    try:
        for action in operation.actions:
            action.do(workspace)
    except NotReached:
        raise
    except Exception as error:
        log.write("undo", operation, str(error))
        workspace.report(f"failed, undoing all steps: {error}")
        undo(log, operation, workspace, str(error))
        raise OperationFailed(f"'{operation}' failed and was undone: {error}") from error
    except KeyboardInterrupt:
        workspace.report(f"'{operation}' was interrupted; the next publish, add or retire finishes it")
        raise
    log.write("done", operation)


def undo(log: OperationJournal, operation: Operation, workspace: Workspace, note: str = "") -> None:
    """Undo the actions of an operation whose event `undo` is in the journal.

    Raises:
        VariantInUse: a variant to be removed receives requests; a version to be retired then stays.
        OperationFailed: the server refuses.
    """
    try:
        for action in reversed(operation.actions):
            action.undo(workspace)
    except VariantInUse as error:
        # Variants are removed first, so nothing is missing yet.
        if operation.kind == "retire":
            log.write("undone", operation, str(error))
        raise
    # To retire a version is to undo its publication, and to remove a model to undo its addition.
    log.write("done" if operation.kind in ("retire", "remove") else "undone", operation, note)


def begin(
    log: OperationJournal, workspace: Workspace, kind: Kind, model: str, version: int
) -> tuple[Operation, Workspace]:
    """Write the begin of an operation to the journal; return it, and a workspace with its own staging."""
    user = user_name(os.getuid())
    operation = Operation(secrets.token_hex(8), kind, model, version, user)
    log.write("begin", operation)
    return operation, _with_staging(workspace, log, operation)


@contextmanager
def preparation(
    log: OperationJournal, unstaged: Workspace, kind: Kind, model: str, version: int
) -> Iterator[tuple[Operation, Workspace]]:
    """Begin an operation whose files are staged inside the context; an error there ends it."""
    operation, workspace = begin(log, unstaged, kind, model, version)
    try:
        yield operation, workspace
    except BaseException as error:
        log.write("undone", operation, str(error))
        raise


def take_out(
    log: OperationJournal,
    unstaged: Workspace,
    kind: Kind,
    model: str,
    version: int,
    actions: tuple[Action, ...],
) -> None:
    """Undo actions that an earlier operation has done; errors as `undo`."""
    operation, workspace = begin(log, unstaged, kind, model, version)
    operation = replace(operation, actions=actions)
    log.write("undo", operation)
    undo(log, operation, workspace)


def _with_staging(workspace: Workspace, log: OperationJournal, operation: Operation) -> Workspace:
    staging = log.staging(operation)
    staging.mkdir(exist_ok=True)
    return dataclasses.replace(workspace, staging=staging)

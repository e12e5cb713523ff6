"""How a change of a repository is carried out, such that no kill and no refusal leaves it half done."""

import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from nereid import json_lines
from nereid.errors import OperationFailed
from nereid.publish.engine import journal
from nereid.publish.engine.actions import Workspace, backward, forward
from nereid.publish.engine.journal import Journal, Kind, Operation
from nereid.publish.engine.variants import VariantInUse
from nereid.server.control import NotReached
from nereid.server.run_dir import ServerRecord

EXPLICIT = "explicit"


@contextmanager
def locked_repository(
    repository: Path, record: ServerRecord | None, report: Callable[[str], None]
) -> Iterator[tuple[Journal, Workspace]]:
    """Hold the journal, after making good what the last holder left unfinished.

    Raises:
        OperationFailed: somebody else holds it, what is left cannot be made good now, or the server does not
            load and unload models when told to.
    """
    repository = repository.resolve()
    if record and record.model_control_mode != EXPLICIT:
        raise OperationFailed(
            f"the server runs with --model-control-mode {record.model_control_mode} and cannot be told what "
            "to load; fix: nereid serve without it, or stop it first"
        )
    with journal.opened(repository) as log:
        site = Workspace(repository, log.folder, record, report)
        recover(log, site)
        yield log, site


def recover(log: Journal, site: Workspace) -> None:
    """Finish or undo what a killed command left.

    Raises:
        OperationFailed: that is not possible now.
    """
    if not (line := log.unfinished()):
        return
    operation = line.operation
    site = _at(site, log, operation)
    site.report(f"{operation} of {line.time:%Y-%m-%d %H:%M:%S} UTC was left unfinished")
    try:
        if line.event == "begin":
            log.write("undone", operation, "recovered")
        elif line.event == "commit":
            commit(log, operation, site)
        else:
            undo(log, operation, site, line.note)
    except OperationFailed as error:
        if log.unfinished():
            raise
        site.report(str(error))
    site.report(f"{operation}: {log.lines()[-1].event}")


def commit(log: Journal, operation: Operation, site: Workspace) -> None:
    """Do the actions of an operation; if one fails, take all of them back.

    Raises:
        OperationFailed: one failed, and all are taken back; `NotReached`: the server is gone.
    """
    log.write("commit", operation)
    try:
        forward(operation.actions, site)
    except NotReached:
        raise
    except Exception as error:
        log.write("undo", operation, str(error))
        site.report(f"refused, taking it back: {error}")
        undo(log, operation, site, str(error))
        raise OperationFailed(f"{operation} failed, and was taken back: {error}") from error
    except KeyboardInterrupt:
        site.report(f"{operation} was interrupted: the next command finishes it")
        raise
    log.write("done", operation)


def undo(log: Journal, operation: Operation, site: Workspace, note: str = "") -> None:
    """Take the actions of an operation back, from where `undo` was written.

    Raises:
        VariantInUse: requests are sent to what is to go. A version that was to be retired then stays.
        OperationFailed: the server does not do it.
    """
    try:
        backward(operation.actions, site)
    except VariantInUse as error:
        # Variants go first, so nothing is missing yet.
        if operation.kind == "retire":
            log.write("undone", operation, str(error))
        raise
    log.write(operation.taken_back, operation, note)


def begin(log: Journal, at: Workspace, kind: Kind, model: str, version: int) -> tuple[Operation, Workspace]:
    """Write down that an operation begins; returns it, and its own site."""
    user = json_lines.user_name(os.getuid())
    operation = Operation(secrets.token_hex(8), kind, model, version, user)
    log.write("begin", operation)
    return operation, _at(at, log, operation)


def _at(site: Workspace, log: Journal, operation: Operation) -> Workspace:
    staging = log.staging(operation)
    staging.mkdir(exist_ok=True)
    return dataclasses.replace(site, staging=staging)

"""How a change of a repository is carried out, such that no kill and no refusal leaves it half done."""

import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ops import json_lines
from ops.cli import CommandFailed
from ops.control import NotReached
from ops.publish import journal
from ops.publish.actions import Site, backward, forward
from ops.publish.journal import Journal, Kind, Operation
from ops.run_dir import ServerRecord
from python_backend.errors import InvalidConfig


@contextmanager
def working(
    repository: Path, record: ServerRecord | None, report: Callable[[str], None]
) -> Iterator[tuple[Journal, Site]]:
    """Hold the journal, after making good what the last holder left unfinished."""
    repository = repository.resolve()
    with journal.opened(repository) as log:
        site = Site(repository, log.folder, record, report)
        recover(log, site)
        yield log, site


def recover(log: Journal, site: Site) -> None:
    """Finish or undo what a killed command left.

    Raises:
        CommandFailed: that is not possible now.
    """
    if not (line := log.unfinished()):
        return
    operation = line.operation
    site = _at(site, log, operation)
    site.report(f"{operation} of {line.time:%Y-%m-%d %H:%M:%S} UTC was left unfinished")
    if line.event == "begin":
        log.write("undone", operation, "recovered")
    elif line.event == "commit":
        carry_out(log, operation, site)
    else:
        backward(operation.actions, site)
        log.write(operation.taken_back, operation, line.note)
    site.report(f"{operation}: {log.lines()[-1].event}")


def carry_out(log: Journal, operation: Operation, site: Site) -> None:
    """Do the actions of an operation; if one is refused, take all of them back.

    Raises:
        CommandFailed: one was refused, and nothing has changed; `NotReached`: the server is gone.
    """
    log.write("commit", operation)
    try:
        forward(operation.actions, site)
    except NotReached:
        raise
    except (CommandFailed, InvalidConfig, OSError) as error:
        log.write("undo", operation, str(error))
        site.report(f"refused, taking it back: {error}")
        backward(operation.actions, site)
        log.write("undone", operation, str(error))
        raise CommandFailed(f"{operation} failed, and nothing has changed: {error}") from error
    log.write("done", operation)


def begin(log: Journal, at: Site, kind: Kind, model: str, version: int) -> tuple[Operation, Site]:
    """Write down that an operation begins; returns it, and its own site."""
    user = json_lines.user_name(os.getuid())
    operation = Operation(secrets.token_hex(8), kind, model, version, user)
    log.write("begin", operation)
    return operation, _at(at, log, operation)


def _at(site: Site, log: Journal, operation: Operation) -> Site:
    staging = log.staging(operation)
    staging.mkdir(exist_ok=True)
    return dataclasses.replace(site, staging=staging)

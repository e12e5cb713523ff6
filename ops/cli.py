"""What all commands share: their exit codes, how a failure is told, and the repository they are about."""

import sys
from pathlib import Path
from typing import Annotated, ClassVar, NoReturn

import typer

FAILED, WRONG_USAGE = 1, 2

Repository = Annotated[
    Path, typer.Option(help="Model repository.", envvar="NEREID_REPOSITORY", show_default="this checkout's")
]


class CommandFailed(Exception):
    """The thing asked for failed; the message is the reason, and perhaps what mends it."""

    status: ClassVar[int] = FAILED


class WrongUsage(CommandFailed):
    """The command cannot be meant like this."""

    status = WRONG_USAGE


def fail(message: str, status: int) -> NoReturn:
    """End the command: the reason goes to stderr, the exit code is `status`."""
    print(message, file=sys.stderr)
    raise typer.Exit(status)

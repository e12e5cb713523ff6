"""What all commands share: their exit codes, how a failure is told, and the repository they are about."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from nereid.errors import OperationFailed, WrongUsage
from nereid.serving_errors import ServingError

if TYPE_CHECKING:
    from nereid.server.run_dir import ServerRecord

FAILED, WRONG_USAGE = 1, 2

Repository = Annotated[
    Path, typer.Option(help="Model repository.", envvar="NEREID_REPOSITORY", show_default="this checkout's")
]


def fail(message: str, status: int) -> NoReturn:
    """End the command: the reason goes to stderr, the exit code is `status`."""
    print(message, file=sys.stderr)
    raise typer.Exit(status)


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Turn what a command may raise into its reason on stderr and its exit code."""
    try:
        yield
    except OperationFailed as error:
        fail(str(error), WRONG_USAGE if isinstance(error, WrongUsage) else FAILED)
    except ServingError as error:
        fail(str(error), FAILED)
    except BrokenPipeError:
        raise
    except OSError as error:
        named = f"'{error.filename}': " if error.filename else ""
        fail(f"{named}{error.strerror or error}", FAILED)


def find_server(context: typer.Context, repository: Path) -> "ServerRecord | None":
    """Return the running server of a repository, if there is one; `context` brings the environment."""
    from nereid.server import run_dir

    return run_dir.find(run_dir.root(context.obj), repository)

"""Exit codes of the command line, and the one place that maps errors to them."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from typer._click.exceptions import ClickException  # Typer's copy of Click; not exported otherwise
from typer.core import TyperCommand, TyperGroup

from nereid import files
from nereid.errors import OperationFailed, WrongUsage
from nereid.serving_errors import ServingError

FAILED, WRONG_USAGE = 1, 2
# The modules that an extra of the distribution brings; all others come with Nereid itself.
MODULES = {
    "embedded": ("pytriton",),
    "cpu": ("onnxruntime",),
    "text": ("cv2",),
    "publish": ("onnx", "watchfiles"),
    "gateway": (
        "uvicorn",
        "starlette",
        "python_multipart",
        "prometheus_client",
        "swagger_ui_bundle",
        "h2",
        "hyperframe",
    ),
    "traces": ("opentelemetry",),
}


def exit_code(error: Exception) -> int:
    """Return the exit code of an error: 2 if the command itself is wrong, else 1."""
    return WRONG_USAGE if isinstance(error, WrongUsage | ClickException) else FAILED


def reason(error: Exception) -> str:
    """Return the text that a user reads: for a system error with the name of the file, if there is one."""
    if isinstance(error, ClickException):
        context = getattr(error, "ctx", None)
        fix = f"; fix: see `{context.command_path} --help`" if context else ""
        return error.format_message().rstrip(".") + fix
    if isinstance(error, OSError):
        # Of the two files of a copy, the second is written.
        name = error.filename2 if error.errno in files.FULL and error.filename2 else error.filename
        named = f"'{name}': " if name else ""
        return f"{named}{error.strerror or error}"
    return str(error)


@contextlib.contextmanager
def exiting() -> Iterator[None]:
    """Map errors to exit codes; the last line on stderr is then `error: REASON`."""
    from nereid.client.classifier_errors import ClassifierError

    try:
        yield
    except BrokenPipeError:  # the reader of stdout has gone, as in `nereid ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except (OperationFailed, ServingError, ClassifierError, ClickException, OSError) as error:
        end(error)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extra = next((extra for extra, modules in MODULES.items() if module in modules), None)
        if extra is None:
            raise  # a defect
        end(OperationFailed(f"this needs the package '{module}'; fix: pip install 'nereid-serving[{extra}]'"))


def end(error: Exception) -> NoReturn:
    """End the process with the code and the reason of an error; a reason of several lines keeps its order.

    Details come first, so that the last line is the reason itself.
    """
    first, *details = reason(error).splitlines() or [type(error).__name__]
    for line in [*details, f"error: {first}"]:
        print(line, file=sys.stderr)
    sys.exit(exit_code(error))


class Command(TyperCommand):
    """A command whose first argument may be typed as an option, as in other commands: `--model NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line."""
        first = next((each.name for each in self.params if each.param_type_name == "argument"), "")
        if first in ("model", "repository"):
            for index, word in enumerate(args):
                name, equals, value = word.partition("=")
                if name == f"--{first}" and (equals or index + 1 < len(args)):
                    rest = args[:index] + args[index + (1 if equals else 2) :]
                    args = [value if equals else args[index + 1], *rest]
                    break
        return list(super().parse_args(ctx, args))


class CommandGroup(TyperGroup):
    """The root of the command line: every failure ends with `error: REASON` and its exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line, and end the process."""
        with exiting():
            code = super().main(*args, **options | {"standalone_mode": False})
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)

"""Exit codes of the command line, the one place that maps errors to them, and its safe output."""

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
from nereid.units import escaped

FAILED, WRONG_USAGE = 1, 2
# The modules that an extra of the distribution brings; all others come with Nereid itself.
MODULES = {
    "embedded": ("pytriton",),
    "cpu": ("onnxruntime",),
    "text": ("cv2", "zxingcpp"),
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

# Options that stand for the first argument of a command, by its name.
OPTIONS_OF_ARGUMENTS = {"model": ("--model", "--route"), "repository": ("--repository",)}


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
    except RuntimeError as error:
        if "start new thread" not in str(error):  # Python has no class for it
            raise
        end(
            OperationFailed(
                f"{error}: the system refuses it", "a higher limit of processes (ulimit -u, pids.max)"
            )
        )
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
    first, *details = (reason(error).rstrip() or type(error).__name__).split("\n")
    for line in [*details, f"error: {first}"]:
        print(line, file=sys.stderr)
    sys.exit(exit_code(error))


class SafeStream:
    """A text stream that escapes what would act on a terminal: names and messages may come from anybody."""

    def __init__(self, raw: Any) -> None:
        # Rich writes its own sequences to this; `tables.SafeConsole` escapes the rest.
        self.rich_proxied_file = raw

    def write(self, text: str) -> int:
        """Write a text."""
        self.rich_proxied_file.write(escaped(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


class Command(TyperCommand):
    """A command whose first argument may be typed as an option, as in other commands: `--model NAME`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line."""
        first = next((each.name for each in self.params if each.param_type_name == "argument"), "")
        for index, word in enumerate(args):
            name, equals, value = word.partition("=")
            if name in OPTIONS_OF_ARGUMENTS.get(first, ()) and (equals or index + 1 < len(args)):
                rest = args[:index] + args[index + (1 if equals else 2) :]
                args = [value if equals else args[index + 1], *rest]
                break
        return list(super().parse_args(ctx, args))


class CommandGroup(TyperGroup):
    """The root of the command line: every failure ends with `error: REASON` and its exit code."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line, and end the process."""
        safe = SafeStream(sys.stdout), SafeStream(sys.stderr)
        with contextlib.redirect_stdout(safe[0]), contextlib.redirect_stderr(safe[1]), exiting():
            code = super().main(*args, **options | {"standalone_mode": False})
            sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else 0)

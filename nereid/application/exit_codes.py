"""Exit codes of all programs, the only mapping from errors to them, and safe terminal output."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from nereid.base import files
from nereid.base.errors import OperationFailed, ServingError, WrongUsage
from nereid.base.units import escaped

FAILED, WRONG_USAGE = 1, 2
# The modules that an extra of the distribution installs; all others come with Nereid itself.
MODULES = {
    "embedded": ("pytriton",),
    "cpu": ("onnxruntime",),
    "text": ("cv2", "zxingcpp", "pypdfium2"),
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


def reason(error: Exception) -> str:
    """Return the text that a user reads; for a system error, it includes the file name, if there is one."""
    if isinstance(error, OSError):
        # Of the two files of a copy, the second is written.
        name = (
            error.filename2 if error.errno in files.DISK_FULL_ERRNOS and error.filename2 else error.filename
        )
        named = f"'{name}': " if name else ""
        return f"{named}{error.strerror or error}"
    return str(error)


@contextlib.contextmanager
def exiting() -> Iterator[None]:
    """Map errors to exit codes; the last line on stderr is then `error: REASON`."""
    from nereid.client.client_errors import NereidError

    try:
        yield
    except BrokenPipeError:  # the reader of stdout has gone, as in `nereid ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    except (OperationFailed, ServingError, NereidError, OSError) as error:
        end(error)
    except RuntimeError as error:
        if "start new thread" not in str(error):  # Python has no class for it
            raise
        end(OperationFailed(f"{error}: too many processes", "a higher limit (ulimit -u, pids.max)"))
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extra = next((extra for extra, modules in MODULES.items() if module in modules), None)
        if extra is None:
            raise  # a defect
        end(OperationFailed(f"this needs the package '{module}'; fix: pip install 'nereid-serving[{extra}]'"))


def end(error: Exception) -> NoReturn:
    """End the process with the reason of an error, and code 2 if the command itself is wrong, else 1.

    Further lines of a reason come first, so that the last line is the reason itself.
    """
    first, *details = (reason(error).rstrip() or type(error).__name__).split("\n")
    for line in [*details, f"error: {first}"]:
        print(line, file=sys.stderr)
    sys.exit(WRONG_USAGE if isinstance(error, WrongUsage) else FAILED)


class SafeStream:
    """A text stream that escapes what would affect a terminal: names and messages may be untrusted."""

    def __init__(self, raw: Any) -> None:
        # Rich writes its own sequences to this; `tables.SafeConsole` escapes the rest.
        self.rich_proxied_file = raw

    def write(self, text: str) -> int:
        """Write a text."""
        self.rich_proxied_file.write(escaped(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextlib.contextmanager
def program() -> Iterator[None]:
    """Run a program to its exit code, with output that is safe on a terminal."""
    safe = SafeStream(sys.stdout), SafeStream(sys.stderr)
    with contextlib.redirect_stdout(safe[0]), contextlib.redirect_stderr(safe[1]), exiting():
        yield
        sys.stdout.flush()

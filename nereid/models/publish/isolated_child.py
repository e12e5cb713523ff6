"""A separate process for code that may crash on a user's network, or never finish.

The child reads one request from stdin. It writes JSON lines to stdout: `{"progress": …}` for each step, then
its result under another key.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

from nereid.base.processes import PR_SET_PDEATHSIG

# Kept of its stderr, whose last line is the reason for a crash.
MAX_ERROR_BYTES = 4096
# Client secrets, which no network needs to see.
SECRETS = frozenset({"NEREID_KEY"})
Write = Callable[[str, object], None]


class NoResult(Exception):
    """The child ended without a result.

    Args:
        status: its exit status; negative for a signal.
        is_late: whether it was killed for exceeding the time limit.
        last: its last step.
        output: the last line that it wrote to stderr.
    """

    def __init__(self, status: int, is_late: bool, last: str, output: str) -> None:
        super().__init__(output)
        self.status = status
        self.is_late = is_late
        self.last = last
        self.output = output


def run(
    module: str,
    request: str,
    timeout_s: float,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[str, Any]:
    """Call `module.handle_request(request, write)` in a child that ends with this process; return the result.

    Args:
        module: its `handle_request` writes steps and a result, each as a word and its content.
        request: the text for it.
        timeout_s: time after which the child is killed.
        progress: receives each step.

    Raises:
        NoResult: it crashed, or exceeded the time limit.
    """
    with tempfile.TemporaryFile() as errors, _process(module, errors) as process:
        start, timer = time.monotonic(), threading.Timer(timeout_s, _kill, (process,))
        timer.start()
        try:
            result, last_step = _read_results(process, request, progress)
            if result:
                return result
            status = process.wait()
        finally:
            timer.cancel()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - MAX_ERROR_BYTES))
        lines = errors.read().decode(errors="replace").strip().splitlines()
        raise NoResult(
            status, time.monotonic() - start >= timeout_s, last_step, lines[-1].strip() if lines else ""
        )


@contextlib.contextmanager
def _process(module: str, errors: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    """Run the child in its own session; kill its process group at the end."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, module, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={name: value for name, value in os.environ.items() if name not in SECRETS},
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _read_results(
    process: subprocess.Popen[str], request: str, progress: Callable[[str], None]
) -> tuple[tuple[str, Any] | None, str]:
    """Return the result, None if there is none, and the last step."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has already exited; its status tells why
        process.stdin.write(request)
        process.stdin.close()
    last_step = "starting"
    for line in process.stdout:
        try:
            ((kind, content),) = json.loads(line).items()
        except ValueError:  # a line that was cut off when the process ended
            break
        if kind != "progress":
            return (kind, content), last_step
        last_step = content
        progress(content)
    return None, last_step


def main(module: str, parent: int) -> None:
    """Handle the request on stdin.

    Args:
        module: as for `run`.
        parent: process id of the command; this process ends with it.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the command has already exited
        return
    with os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as out:
        os.dup2(2, 1)  # output of libraries must not reach the results

        def write(kind: str, content: object) -> None:
            with contextlib.suppress(BrokenPipeError):
                out.write(json.dumps({kind: content}) + "\n")

        importlib.import_module(module).handle_request(sys.stdin.buffer.read().decode(), write)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

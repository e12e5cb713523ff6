"""Section processes with a time limit: results that survive a hang, a crash, and the end of the run."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from nereid.processes import end_with_parent

# A section that gets SIGTERM has this long to stop its server; a hang in CUDA ignores SIGTERM.
STOP_S = 5.0
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LOG_LINES = 12


class Ended(NamedTuple):
    """How a process ended: `status` is done, failed, crashed or timed out; `reason` is empty if done."""

    status: str
    reason: str
    seconds: float


def run(
    words: Sequence[str],
    log: Path,
    limit_s: float,
    environment: Mapping[str, str],
    stop_s: float = STOP_S,
) -> Ended:
    """Run a command for at most `limit_s` seconds, `stop_s` of them for its end; its output goes to `log`.

    On a timeout, the command and all processes that it started end, too.
    """
    begin_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
    try:
        code: int | None = process.wait(max(0.0, limit_s - stop_s))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        _end(process, stop_s)
    return _ended(code, log, limit_s, time.monotonic() - begin_s)


def descendants(pid: int) -> list[int]:
    """Return the living processes below a process, of all sessions."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
    found, level = list[int](), [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += level
    return found


def _end(process: subprocess.Popen, stop_s: float) -> None:
    """End a process and those that it started; one that is over has none."""
    if process.poll() is not None:
        return
    # Listed before the end, because a process that lost its parent cannot be found below it.
    below = descendants(process.pid)
    process.terminate()
    try:
        process.wait(stop_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _ended(code: int | None, log: Path, limit_s: float, seconds: float) -> Ended:
    if code == 0:
        return Ended("done", "", seconds)
    if code is None:
        return Ended("timed out", f"not done after {limit_s:.0f} s; {_tail(log)}", seconds)
    if code < 0:
        return Ended("crashed", f"{signal.Signals(-code).name}; {_tail(log)}", seconds)
    return Ended("failed", f"exit code {code}; {_tail(log)}", seconds)


def _tail(log: Path) -> str:
    lines = COLOURS.sub("", log.read_text(errors="replace")).splitlines()[-LOG_LINES:]
    return "its output ends: " + " | ".join(lines) if lines else "no output"

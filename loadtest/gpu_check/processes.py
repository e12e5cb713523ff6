"""Processes with a time limit: what they found survives a hang, a crash, and the end of the run."""

import contextlib
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from nereid.base.processes import end_with_parent

# A process that gets SIGTERM has this long to stop its server; a hang in CUDA ignores SIGTERM.
STOP_S = 5.0
ROOT = Path(__file__).resolve().parents[2]
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LOG_LINES = 12


class Context(NamedTuple):
    """The surroundings of a section: environment, folder of its files, and the seconds that are left."""

    environment: Mapping[str, str]
    folder: Path
    remaining_s: Callable[[], float]


class Ended(NamedTuple):
    """How a process ended: `status` is done, failed, crashed or timed out; `reason` is empty if done."""

    status: str
    reason: str


def run(words: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str]) -> Ended:
    """Run a command for at most `limit_s` seconds, `STOP_S` of them for its end; its output goes to `log`.

    On a timeout, the command and all processes that it started end, too.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
    code: int | None = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(max(0.0, limit_s - STOP_S))
    finally:
        _end(process)
    if code == 0:
        return Ended("done", "")
    # The reason goes into a record, which has no paths of a machine.
    text = COLOURS.sub("", log.read_text(errors="replace")).replace(f"{ROOT}/", "").replace(str(ROOT), ".")
    lines = text.splitlines()[-LOG_LINES:]
    tail = "its output ends: " + " | ".join(lines) if lines else "no output"
    if code is None:
        return Ended("timed out", f"not done after {limit_s:.0f} s; {tail}")
    if code < 0:
        return Ended("crashed", f"{signal.Signals(-code).name}; {tail}")
    return Ended("failed", f"exit code {code}; {tail}")


def _end(process: subprocess.Popen) -> None:
    """End a process and those that it started; one that is over has none."""
    if process.poll() is not None:
        return
    # Listed before the end, because a process that lost its parent cannot be found below it.
    below = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in below:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()

"""The tests of tests/gpu, each file in a pytest of its own with a time limit."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest.gpu_check import processes
from loadtest.gpu_check.machine import has
from loadtest.gpu_check.processes import Context, Ended
from nereid.base.processes import available_cores

# Time limits of the files in seconds.
FILES = {
    "test_onnxruntime": 40.0,
    "test_cuda_shared_memory": 60.0,
    "test_server_on_gpu": 120.0,
    "test_gpu_preprocessor": 90.0,
}
# Most of the time of these tests is spent in the compiler of the kernel.
COMPILING, PROCESSES = "test_gpu_preprocessor", 12
MESSAGE_CHARACTERS = 400


def measure(context: Context) -> Iterator[dict[str, Any]]:
    """Yield pytest's summary of each file, and the tests that failed or were skipped."""
    for name, limit_s in FILES.items():
        yield {name: run(name, min(limit_s, context.remaining_s()), context)}


def run(name: str, limit_s: float, context: Context) -> dict[str, Any]:
    """Run a file of tests/gpu for at most `limit_s` seconds; its log and report stay in the folder."""
    stem = context.folder / f"tests-{name}"
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "--verbose", "-rfEs", "--maxfail=5"]
    # A test that hangs leaves the stack of every thread in the log.
    words += ["-o", f"faulthandler_timeout={max(1, round(limit_s / 2))}", f"--junitxml={stem}.xml"]
    if name == COMPILING and has("xdist"):
        words += ["--numprocesses", str(min(PROCESSES, available_cores()))]
    log = Path(f"{stem}.log")
    ended = processes.run([*words, f"tests/gpu/{name}.py"], log, limit_s, context.environment)
    return outcome(log.read_text(errors="replace"), ended)


def outcome(output: str, ended: Ended) -> dict[str, Any]:
    """Read pytest's output: its summary, and a line for each test that failed or was skipped."""
    lines = processes.COLOURS.sub("", output).splitlines()
    problems = [line[:MESSAGE_CHARACTERS] for line in lines if re.match(r"(FAILED|ERROR|SKIPPED) ", line)]
    if ended.status in ("done", "failed") and lines and (match := re.fullmatch(r"=+ (.+) =+", lines[-1])):
        return {"summary": match[1], "problems": problems}
    words = (f"{output.count(f' {word.upper()} ')} {word}" for word in ("passed", "failed", "skipped"))
    return {
        "summary": f"{', '.join(words)}, stopped: {ended.reason[:MESSAGE_CHARACTERS]}",
        "problems": problems,
    }

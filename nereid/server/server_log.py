"""Triton's log as an operator wants it: noise of a machine without a GPU folded, failures explained."""

import re
from collections import deque
from collections.abc import Callable

NO_GPU_NOISE = (
    "Unable to allocate pinned system memory",
    "CUDA memory pool disabled",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "unable to create stream for",
)
FAILED_LOAD = re.compile(r"failed to load '(?P<model>[^']+)' version (?P<version>\d+): (?P<reason>.*)")
FAILED_POLL = re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.*)")
FAILED_OTHERWISE = re.compile(r"^(error: |E\d+ .*?\] )(?P<reason>.*)")
PARSE_ERROR = re.compile(r"Error parsing text-format inference\.ModelConfig: (?P<reason>.*)")
TAIL_LINES = 30


class ServerLog:
    """Takes the server's lines one by one, hands on those worth showing, and remembers what went wrong."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._failures: dict[str, str] = {}
        self._parse_error = ""
        self._errors: deque[str] = deque(maxlen=TAIL_LINES)
        self._noise_folded = False

    def add(self, line: str) -> None:
        """Take one line of the log."""
        self._tail.append(line)
        if any(noise in line for noise in NO_GPU_NOISE):
            if not self._noise_folded:
                self._noise_folded = True
                self._show("no GPU: serving on the CPU (Triton's CUDA, NVML and DCGM warnings are left out)")
        else:
            self._remember(line)
            self._show(line)

    def tail(self) -> str:
        """Return the last lines, for a failure without a known reason."""
        return "\n".join(self._tail)

    def reason(self) -> str:
        """Return why the server ended: a line for each model that failed, else Triton's own errors."""
        if self._failures:
            return "\n".join(f"model '{model}': {reason}" for model, reason in self._failures.items())
        return "\n".join(self._errors) or f"tritonserver ended without an error:\n{self.tail()}"

    def _remember(self, line: str) -> None:
        if found := PARSE_ERROR.search(line):
            self._parse_error = found["reason"]
        elif found := FAILED_LOAD.search(line):
            self._fail(found["model"], found["reason"])
        elif found := FAILED_POLL.search(line):
            # Triton prints what the parser found on a line of its own, just before.
            detail, self._parse_error = self._parse_error, ""
            self._fail(found["model"], found["reason"], f" ({detail})" if detail else "")
        elif found := FAILED_OTHERWISE.search(line):
            self._errors.append(_first_line(found["reason"]))

    def _fail(self, model: str, reason: str, detail: str = "") -> None:
        self._failures.setdefault(model, _first_line(reason) + detail)


def _first_line(reason: str) -> str:
    """Leave out the stub's Python traceback behind the message; Triton escapes newlines and quotes."""
    first = reason.split("\\n")[0].removesuffix('"').replace('\\"', '"')
    return first.removeprefix('"').removeprefix("Internal: ").removeprefix("InvalidConfig: ")

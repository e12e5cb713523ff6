"""Triton's log for an operator, without noise and repetitions, and the reasons for failures."""

import contextlib
import json
import queue
import re
import time
from collections import Counter, deque
from collections.abc import Callable

from nereid.base.contract import read_failed_device
from nereid.base.errors import ServerError

NO_GPU_NOISE = (
    "Unable to allocate pinned system memory",
    "CUDA memory pool disabled",
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "unable to create stream for",
)
# Logged for each connection to a Unix socket, which has no Nagle algorithm to turn off.
SOCKET_NOISE = "NODELAY NOT SUPPORTED"
# Triton logs these before "failed to load", which repeats the reason and the traceback.
REPEATED = ("Failed to initialize Python stub: ", "ERROR: Failed to create instance: ")
FAILED_LOAD = re.compile(r"failed to load '(?P<model>[^']+)' version (?P<version>\d+): (?P<reason>.*)")
FAILED_POLL = re.compile(r"Poll failed for model directory '(?P<model>[^']+)': (?P<reason>.*)")
# One line per model, in the error with which the server exits.
FAILED_AT_END = re.compile(
    r"load failed for model '(?P<model>[^']+)': (version \d+ is at UNAVAILABLE state: )?(?P<reason>.*?);?$"
)
# Repeats the reason for a model that an ensemble runs.
REASON_OF_STEP = re.compile(r" Model '[^']+' loading failed with error: .*")
FAILED_OTHERWISE = re.compile(r"^(error: |E\d+ .*?\] )(?P<reason>.*)")
PARSE_ERROR = re.compile(r"Error parsing text-format inference\.ModelConfig: (?P<reason>.*)")
LOG_LINE = re.compile(r"^[IWE]\d{4} ")
# A continuation line of a status in Triton's model table: a traceback.
CONTINUED_ROW = re.compile(r"^\|\s+\|\s+\|")
LAST_WORDS = "error: "
# Triton's line about a signal that terminates it.
SIGNAL = re.compile(r"^Signal \((\d{1,2})\) received")
TAIL_LINES = 30
# Time, process and source location before the message.
LOG_HEAD = re.compile(r"^([IWE]\d{4} [^\]]*\] |\[\w+\] )")
# Without a limit, a server that is out of descriptors logs 100,000 lines per second.
PERIOD_S = 10.0
MAX_REPETITIONS = 20
MAX_MESSAGES = 10_000
MAX_CHARACTERS = 300


class LineLimit:
    """Limits the lines with the same message in a period, and shows how many were left out."""

    def __init__(self, show: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._show, self._clock = show, clock
        self._counts: Counter[str] = Counter()
        self._started_at = clock()

    def is_exceeded(self, line: str) -> bool:
        """Return whether to drop a line because its message was too frequent in this period."""
        if self._clock() - self._started_at >= PERIOD_S or len(self._counts) >= MAX_MESSAGES:
            self._report()
        message = LOG_HEAD.sub("", line)[:MAX_CHARACTERS]
        self._counts[message] += 1
        return self._counts[message] > MAX_REPETITIONS

    def _report(self) -> None:
        for message, count in self._counts.items():
            if count > MAX_REPETITIONS:
                self._show(f"{count - MAX_REPETITIONS} more lines were left out: {message}")
        self._counts.clear()
        self._started_at = self._clock()


class ServerLog:
    """Log of one server: passes lines to `show`, without noise or repetitions, and keeps failure reasons."""

    def __init__(self, show: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._limit = LineLimit(show, clock)
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        # The reasons of models that failed to load.
        self.failures: dict[str, str] = {}
        self._reasons: set[str] = set()
        self._parse_error = ""
        self._errors: deque[str] = deque(maxlen=TAIL_LINES)
        self._noise_folded = False
        self._is_ending = False
        # The signal that is ending the server, 0 for none; a model may have written the line.
        self.signal = 0
        self._failed_devices: queue.SimpleQueue[int] = queue.SimpleQueue()

    def add(self, line: str) -> None:
        """Process one line of the log."""
        if SOCKET_NOISE in line:
            return
        self._tail.append(line)
        if signalled := SIGNAL.match(line):
            self.signal = int(signalled[1])
        if pid := read_failed_device(LOG_HEAD.sub("", line)):
            self._failed_devices.put(pid)
        if any(noise in line for noise in NO_GPU_NOISE):
            if not self._noise_folded:
                self._noise_folded = True
                self._show("no GPU: serving on the CPU (Triton's CUDA, NVML and DCGM warnings are left out)")
        elif not self._is_repetition(line):
            self._remember(line)
            if not self._limit.is_exceeded(line):
                self._show(line)

    def take_failed_devices(self) -> set[int]:
        """Return the processes that have reported a failed device since the last call, in one thread."""
        return {self._failed_devices.get() for _ in range(self._failed_devices.qsize())}

    def tail(self) -> str:
        """Return the last lines, for a failure without a known reason."""
        return "\n".join(self._tail)

    def failure(self) -> ServerError:
        """Return why the server ended: the models that failed, else Triton's own errors.

        If neither is known, a note on the error contains the end of the log.
        """
        if reasons := self.failures.values() or self._errors:
            return ServerError("; ".join(reasons))
        error = ServerError("tritonserver ended without an error message")
        error.add_note(self.tail())
        return error

    def refused_load(self, model: str, body: str) -> ServerError:
        """Return the error for Triton's response to a load that failed; it counts as one of `failures`."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            body = json.loads(body)["error"]
        text = body.partition("\n")[0]
        match = FAILED_AT_END.search(text)
        self._fail(model, match["reason"] if match else text)
        return ServerError(self.failures[model])

    def _is_repetition(self, line: str) -> bool:
        """Return whether a line repeats a failure that is logged elsewhere or will be in `failure`."""
        if line.startswith(LAST_WORDS):
            self._is_ending = True
        elif LOG_LINE.match(line):
            self._is_ending = False
        if self._is_ending:
            self._remember(line)
        if self._is_ending or any(prefix in line for prefix in REPEATED):
            return True
        if FAILED_LOAD.search(line) or FAILED_POLL.search(line):
            return False
        is_known = any(reason in line for reason in self._reasons)
        return is_known or (bool(self._reasons) and CONTINUED_ROW.match(line) is not None)

    def _remember(self, line: str) -> None:
        if match := PARSE_ERROR.search(line):
            self._parse_error = match["reason"]
        elif match := FAILED_LOAD.search(line):
            self._fail(match["model"], match["reason"])
        elif match := FAILED_POLL.search(line):
            # Triton prints the parser's message on a line of its own, just before.
            detail, self._parse_error = self._parse_error, ""
            self._fail(match["model"], match["reason"], f" ({detail})" if detail else "")
        elif self._is_ending and (match := FAILED_AT_END.search(line)):
            self._fail(match["model"], REASON_OF_STEP.sub("", match["reason"]))
        elif match := FAILED_OTHERWISE.search(line):
            self._errors.append(_first_line(match["reason"]))

    def _fail(self, model: str, reason: str, detail: str = "") -> None:
        first, named = _first_line(reason), f"model '{model}': "
        if first:  # every line contains an empty string
            self._reasons.add(first)
        self.failures.setdefault(model, named + first.removeprefix(named) + detail)


def _first_line(reason: str) -> str:
    """Remove the stub's Python traceback after the message; Triton escapes newlines and quotes."""
    first = reason.split("\\n")[0].removesuffix('"').replace('\\"', '"')
    return first.removeprefix('"').removeprefix("Internal: ").removeprefix("InvalidConfig: ")

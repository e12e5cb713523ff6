"""Process utilities: cores, memory, signals, exit with the parent, back-off between attempts, threads."""

import contextlib
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, inf
from pathlib import Path
from types import FrameType

from nereid.base.control_groups import OWN, ControlGroups

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A shell reports a command killed by a signal as this plus the signal number.
SIGNALLED = 128
PR_SET_PDEATHSIG = 1
# Seconds within which a killed process exits, unless it is stuck in the kernel.
KILL_TIMEOUT_S = 1.0
# A child that has run this long, in seconds, counts as started.
RESTART_CALM_S = 10.0
# Parameters of mallopt. Source: glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def available_cores(groups: ControlGroups = OWN) -> int:
    """Return how many cores this process may use: its CPU affinity, capped by its control groups' quotas."""
    cores = len(os.sched_getaffinity(0))
    return max(1, ceil(min(cores, groups.cores())))


def available_bytes(meminfo: Path = Path("/proc/meminfo"), groups: ControlGroups = OWN) -> int:
    """Return the available memory in bytes: the machine's, capped by this process's control groups."""
    lines = meminfo.read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return int(min(available, groups.free_memory()))


class ReachedLimits:
    """Describes the effects of this control group's limits, with each limit and a fix."""

    def __init__(self, groups: ControlGroups = OWN) -> None:
        """Count from now on."""
        self._groups = groups
        self._kills, self._refusals = groups.memory_kills(), groups.process_refusals()

    def new_kills(self) -> str:
        """Describe the processes killed for lack of memory since the last call; empty if there are none."""
        before, self._kills = self._kills, self._groups.memory_kills()
        if self._kills <= before:
            return ""
        limit = self._groups.memory_limit()
        why = f"the limit is {limit / 1e6:.0f} MB" if limit < inf else "no control group has a limit"
        fix = "a higher limit" if limit < inf else "more memory"
        ended = f"the kernel killed {self._kills - before} process(es) of this control group"
        return f"out of memory: {ended}; {why}; fix: {fix}, or fewer instances (count in config.pbtxt)"

    def new_refusals(self) -> str:
        """Describe the processes and threads that were not created since the last call; empty if none."""
        before, self._refusals = self._refusals, self._groups.process_refusals()
        if self._refusals <= before:
            return ""
        count, limit = self._refusals - before, self._groups.process_limit()
        return (
            f"process limit reached: the kernel refused {count} process(es) or thread(s) of this control "
            f"group; the limit is {limit:g}; fix: a higher limit (pids.max, TasksMax=, or --pids-limit)"
        )


def raise_open_file_limit() -> int:
    """Let this process and its children open as many files as the system allows; return that number."""
    import resource  # not at the top: stubs import this module, and never need it

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def return_memory() -> None:
    """Release free heap memory that glibc would otherwise keep; other C libraries do not need this."""
    import ctypes  # not at the top: stubs import this module, and most never need it

    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def keep_little_memory() -> None:
    """Make glibc return freed blocks of 1 MiB or more immediately, and free heap memory beyond 16 MiB.

    By default, glibc keeps blocks of up to 32 MiB once one has been freed.
    """
    import ctypes  # not at the top: stubs import this module, and never need it

    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, 2**20)
        mallopt(M_TRIM_THRESHOLD, 2**24)


def cpu_model() -> str:
    """Return the processor's name as the kernel reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def on_signals(
    *actions: Callable[[int], object],
    then: signal.Handlers = signal.SIG_DFL,
    signals: Sequence[signal.Signals] = STOP_SIGNALS,
) -> None:
    """Call the actions in order, one per signal; after the last one, `then` handles further signals.

    Args:
        actions: called in the main thread with the signal number; may raise.
        then: the handler for all further signals.
        signals: the signals to handle.
    """
    left = list(actions)

    def handle(received: int, frame: FrameType | None) -> None:
        action = left.pop(0) if left else None
        if not left:
            for signum in signals:
                signal.signal(signum, then)
        if action:
            action(received)

    for signum in signals:
        signal.signal(signum, handle)


def run_within(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Run a command and return its exit status and output; the status is None if it did not finish in time.

    A process blocked in a driver cannot be killed, and this function does not wait for it either.

    Raises:
        OSError: the command cannot be started.
    """
    import subprocess  # not at the top: stubs import this module, and never need it

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    output = ""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=KILL_TIMEOUT_S)
        return None, output
    return process.returncode, output


class StopFlag:
    """A flag set by the first SIGINT or SIGTERM; the second signal terminates the process.

    A `threading.Event` could deadlock because the handler may interrupt the thread that holds its lock.
    """

    def __init__(self) -> None:
        self._is_set = False
        on_signals(self._set)

    def is_set(self) -> bool:
        """Return whether a signal has arrived."""
        return self._is_set

    def _set(self, signum: int) -> None:
        self._is_set = True


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Raise `SystemExit` on the first SIGTERM so that context managers exit; ignore further ones."""

    def leave(signum: int) -> None:
        raise SystemExit(SIGNALLED + signum)

    before = signal.getsignal(signal.SIGTERM)
    on_signals(leave, then=signal.SIG_IGN, signals=[signal.SIGTERM])
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn` that makes a child die with this process, even if this process is killed."""
    import ctypes  # not at the top: stubs import this module, and most never need it

    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before prctl was called
            os._exit(1)

    return prepare


class BackOff:
    """Delays that grow with each failure, up to the last of `delays_s`; for restarts and repairs.

    After `calm_s` seconds without a failure, they restart from the first delay. `due_at` is when the next
    attempt is due, or None while nothing has failed. All times are from the caller's monotonic clock.
    """

    def __init__(
        self, delays_s: Sequence[float] = (0.1, 1.0, 2.0, 5.0), calm_s: float = RESTART_CALM_S
    ) -> None:
        self._delays_s, self._calm_s = delays_s, calm_s
        self._failures, self._calm_since = 0, -inf
        self.due_at: float | None = None

    def record_start(self, now_s: float) -> None:
        """Record the start of an attempt, or the time from which it counts as successful."""
        self._calm_since, self.due_at = now_s, None

    def record_failure(self, now_s: float) -> float:
        """Record a failure, and return the seconds to wait before the next attempt."""
        if now_s - self._calm_since >= self._calm_s:
            self._failures = 0
        delay_s = self._delays_s[min(self._failures, len(self._delays_s) - 1)]
        self._failures += 1
        self._calm_since, self.due_at = now_s, now_s + delay_s
        return delay_s


@contextlib.contextmanager
def in_background(name: str, run: Callable[[threading.Event], object], join_s: float) -> Iterator[None]:
    """Run a function in a thread while the context is open; its event is set on exit.

    Args:
        name: name of the thread.
        run: must return soon after its event is set.
        join_s: seconds to wait for that; a thread that takes longer does not keep the process from exiting.
    """
    stop = threading.Event()
    thread = threading.Thread(target=run, args=[stop], name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=join_s)

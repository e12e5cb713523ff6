"""Kernel counters for a server's processes: time on a core, waits for one, page faults, limits."""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid.backends.triton.stub_processes import PROC, TICKS_PER_S, Process
from nereid.base.control_groups import ControlGroups
from nereid.server.supervision.process_usage import core_wait_s, tree


def read_cores() -> dict[int, tuple[int, int]]:
    """Return the busy and total ticks of each core. Source: proc(5); guests are part of the user's time."""
    cores = {}
    for line in (PROC / "stat").read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(field) for field in fields[:8]]
            idle, waiting = ticks[3], ticks[4]
            cores[int(name[3:])] = sum(ticks) - idle - waiting, sum(ticks)
    return cores


@dataclass(frozen=True, slots=True)
class ProcessCounts:
    """Counters of one process.

    Attributes:
        ran_s: seconds on a core.
        waited_s: seconds that its threads were ready to run, but had no core.
        switches: times that a thread lost its core to another.
    """

    ran_s: float = 0.0
    waited_s: float = 0.0
    page_faults: int = 0
    switches: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Counters at one moment.

    Attributes:
        busy_s: seconds that the cores were busy; a hypervisor's other guests also count.
        throttled, periods: periods in which the control group's limit stopped threads, of all periods.
    """

    processes: Mapping[Process, ProcessCounts]
    cores: int
    busy_s: float
    throttled: int
    periods: int
    now_s: float


@dataclass(frozen=True, slots=True)
class Contention:
    """Rates between two moments; `wait_ratio` is the wait for a core per second of work.

    `own_cores` and `other_cores` are the cores that the server and all other programs use, of the machine's
    `cores`. `throttled` is the fraction of periods in which the control group's limit stopped threads.
    """

    cores: int
    own_cores: float
    other_cores: float
    wait_ratio: float
    faults_per_s: float
    switches_per_s: float
    throttled: float


def read(server: int, roots: Collection[int]) -> Counts:
    """Return the current counters of processes and their descendants."""
    processes = {}
    for entry in tree({server, *roots}):
        waited_s = core_wait_s(entry.process.pid) or 0.0
        switches = sum(map(_switches, (PROC / str(entry.process.pid) / "task").glob("*")))
        processes[entry.process] = ProcessCounts(entry.cpu_s, waited_s, entry.faults, switches)
    cores = read_cores()
    busy_s = sum(busy for busy, _ in cores.values()) / TICKS_PER_S
    throttling = ControlGroups(membership=PROC / str(server) / "cgroup").throttling()
    return Counts(processes, len(cores), busy_s, *throttling, time.monotonic())


def between(before: Counts, after: Counts) -> Contention:
    """Return the rates between two moments; a process that started in between counts from its start."""
    seconds = max(after.now_s - before.now_s, 1e-9)
    pairs = [
        (counts, before.processes.get(process, ProcessCounts()))
        for process, counts in after.processes.items()
    ]
    ran_s = sum(now.ran_s - then.ran_s for now, then in pairs)
    # The counts of threads that ended are lost.
    waited_s = sum(max(0.0, now.waited_s - then.waited_s) for now, then in pairs)
    switches = sum(max(0, now.switches - then.switches) for now, then in pairs)
    return Contention(
        after.cores,
        ran_s / seconds,
        max(0.0, after.busy_s - before.busy_s - ran_s) / seconds,
        waited_s / max(ran_s, 1 / TICKS_PER_S),
        sum(now.page_faults - then.page_faults for now, then in pairs) / seconds,
        switches / seconds,
        max(0, after.throttled - before.throttled) / max(1, after.periods - before.periods),
    )


def _switches(task: Path) -> int:
    try:
        status = (task / "status").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("nonvoluntary"))

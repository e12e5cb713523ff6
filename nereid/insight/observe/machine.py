"""The use of this machine: processor time of each core, load, memory, and limits of control groups."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from nereid.base.control_groups import OWN, ControlGroups

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class MachineReading:
    """The kernel's counts at one moment.

    Args:
        cores: ticks of each core since the start, by its number: busy, and in total.
        load: mean number of running processes over 1, 5 and 15 minutes.
        limit_cores, limit_bytes: of the control groups of the server; None without a limit.
    """

    cores: Mapping[int, tuple[int, int]]
    load: tuple[float, float, float]
    memory_bytes: int
    available_bytes: int
    limit_cores: float | None
    limit_bytes: int | None


def read_machine(pid: int, proc: Path = PROC) -> MachineReading:
    """Return the counts of this machine, and the limits of a process, or of this one if it has ended."""
    memory = _memory(proc)
    membership = proc / str(pid) / "cgroup"
    groups = ControlGroups(membership=membership) if membership.exists() else OWN
    cores, limit = groups.cores(), groups.memory_limit()
    one, five, fifteen = (float(word) for word in (proc / "loadavg").read_text().split()[:3])
    return MachineReading(
        read_cores(proc),
        (one, five, fifteen),
        memory["MemTotal"],
        memory["MemAvailable"],
        None if cores == inf else cores,
        None if limit == inf else int(limit),
    )


def _memory(proc: Path) -> dict[str, int]:
    found = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        with contextlib.suppress(ValueError, IndexError):
            found[name] = int(rest.split()[0]) * 1024
    return found


def read_cores(proc: Path = PROC) -> dict[int, tuple[int, int]]:
    """Return the busy and all ticks of each core. Source: proc(5); guests are part of the user's time."""
    found = {}
    for line in (proc / "stat").read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(field) for field in fields[:8]]
            idle, waiting = ticks[3], ticks[4]
            found[int(name[3:])] = sum(ticks) - idle - waiting, sum(ticks)
    return found

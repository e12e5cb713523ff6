"""Limits of the control groups of a process: cores, memory, processes, and their effects."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

# Version 1 has numbers near 2^63 for groups without a limit of memory.
UNLIMITED = 2**60


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The control group of this process, and those around it, of both versions.

    A container usually sees its own group only, as the root; a service of systemd has a group of its own.

    Args:
        root: where the control groups are mounted.
        membership: the list of this process's groups.
    """

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def cores(self) -> float:
        """Return the smallest quota in cores, infinite without one."""
        quotas = [inf]
        for folder in self._folders("cpu"):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (folder / "cpu.max").read_text().split()  # of version 2
                quotas.append(float(quota) / float(period))
            with contextlib.suppress(OSError, ValueError):
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                quotas.append(float(quota) / float(period) if float(quota) > 0 else inf)
        return min(quotas)

    def memory_limit(self) -> float:
        """Return the smallest limit in bytes, infinite without one."""
        return min((limit for limit, _ in self._memory()), default=inf)

    def free_memory(self) -> float:
        """Return the bytes that are left of the limits, at least 0, infinite without a limit."""
        return max(0, min((limit - used for limit, used in self._memory()), default=inf))

    def memory_kills(self) -> int:
        """Return how many processes the kernel has ended for lack of memory; 0 if it does not count them."""
        for folder in self._folders("memory"):
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError, ValueError, KeyError):  # Linux before 4.13 has no such line
                    lines = (folder / name).read_text().splitlines()
                    return int(dict(line.split(maxsplit=1) for line in lines)["oom_kill"])
        return 0

    def process_limit(self) -> float:
        """Return the smallest limit of processes and threads, infinite without one."""
        limits = [inf]
        for folder in self._folders("pids"):
            with contextlib.suppress(OSError, ValueError):  # "max" is not a number
                limits.append(int((folder / "pids.max").read_text()))
        return min(limits)

    def process_refusals(self) -> int:
        """Return how many processes and threads the kernel has refused; 0 if it does not count them."""
        count = 0
        for folder in self._folders("pids"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                count += int((folder / "pids.events").read_text().split()[1])
        return count

    def throttling(self) -> tuple[int, int]:
        """Return the periods in which the quota in cores stopped threads, and all periods; 0 without one."""
        for folder in self._folders("cpu"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                lines = (folder / "cpu.stat").read_text().splitlines()
                counts = {name: int(value) for name, value in map(str.split, lines)}
                return counts["nr_throttled"], counts["nr_periods"]
        return 0, 0

    def _memory(self) -> Iterator[tuple[int, int]]:
        """Yield limit and use of each group that has a limit."""
        for folder in self._folders("memory"):
            for limit, used in [
                ("memory.max", "memory.current"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ]:
                with contextlib.suppress(OSError, ValueError):  # "max" is not a number
                    bytes_limit = int((folder / limit).read_text())
                    if bytes_limit < UNLIMITED:
                        yield bytes_limit, int((folder / used).read_text())

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders with a controller's files: the process's own group first, the root last."""
        try:
            lines = self.membership.read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            base = self.root / controller if controllers else self.root
            group = base / path.lstrip("/")
            yield from (group, *(each for each in group.parents if each.is_relative_to(base)))


OWN = ControlGroups()

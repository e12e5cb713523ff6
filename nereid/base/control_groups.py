"""Control-group limits of a process (cores, memory, processes) and their effects."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

# cgroup v1 reports numbers near 2^63 for groups without a memory limit.
UNLIMITED = 2**60


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """This process's control group and its ancestors, in cgroup v1 and v2.

    A container usually sees only its own group, as the root; a systemd service has its own group.

    Args:
        root: where the control groups are mounted.
        membership: the file that lists this process's groups.
    """

    root: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def cores(self) -> float:
        """Return the smallest CPU quota in cores; infinite if there is none."""
        quotas = [inf]
        for folder in self._folders("cpu"):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (folder / "cpu.max").read_text().split()  # version 2
                quotas.append(float(quota) / float(period))
            with contextlib.suppress(OSError, ValueError):
                quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
                quotas.append(float(quota) / float(period) if float(quota) > 0 else inf)
        return min(quotas)

    def memory_limit(self) -> float:
        """Return the smallest memory limit in bytes; infinite if there is none."""
        return min((limit for limit, _ in self._memory()), default=inf)

    def free_memory(self) -> float:
        """Return the bytes left within the limits, at least 0; infinite if there is no limit."""
        return max(0, min((limit - used for limit, used in self._memory()), default=inf))

    def memory_kills(self) -> int:
        """Return how many processes the kernel has killed for lack of memory; 0 if it does not count them."""
        for folder in self._folders("memory"):
            for name in ("memory.events", "memory.oom_control"):
                with contextlib.suppress(OSError, ValueError, KeyError):  # Linux before 4.13 has no such line
                    lines = (folder / name).read_text().splitlines()
                    return int(dict(line.split(maxsplit=1) for line in lines)["oom_kill"])
        return 0

    def process_limit(self) -> float:
        """Return the smallest limit on processes and threads; infinite if there is none."""
        limits = [inf]
        for folder in self._folders("pids"):
            with contextlib.suppress(OSError, ValueError):  # "max" is not a number
                limits.append(int((folder / "pids.max").read_text()))
        return min(limits)

    def process_refusals(self) -> int:
        """Return how many processes and threads the kernel refused to create; 0 if it does not count them."""
        count = 0
        for folder in self._folders("pids"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                count += int((folder / "pids.events").read_text().split()[1])
        return count

    def throttling(self) -> tuple[int, int]:
        """Return the number of throttled periods and of all periods; 0 if there is no CPU quota."""
        for folder in self._folders("cpu"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                lines = (folder / "cpu.stat").read_text().splitlines()
                counts = {name: int(value) for name, value in map(str.split, lines)}
                return counts["nr_throttled"], counts["nr_periods"]
        return 0, 0

    def _memory(self) -> Iterator[tuple[int, int]]:
        """Yield the limit and usage of each group that has a limit."""
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
            yield from (group, *(parent for parent in group.parents if parent.is_relative_to(base)))


OWN = ControlGroups()

"""Deaths of stub processes, from successive observations.

Triton 24.10 does not replace a stub that was killed: its process stays as a zombie child of `tritonserver`,
and requests to its instance fail. A stub that Triton itself ends is collected within milliseconds. A zombie
that stays for longer is therefore a stub that was killed.
"""

import contextlib
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from nereid.backends.triton.stub_processes import ZOMBIE, Process, Stub

# Triton collects a stub that it ended itself within a tenth of this. The time is shorter than the interval of
# observations (0.1 s), so the second observation decides.
DEAD_AFTER_S = 0.09
# Maximum time between the two verdicts: long enough for probes to meet one of many instances twice.
VERDICTS_WITHIN_S = 30.0
# Time that Triton has to end the old stubs of a repaired model.
OLD_STUBS_S = 30.0


class Roster:
    """Known stubs, and which of them have died, from successive observations."""

    def __init__(self) -> None:
        self._known: dict[Process, Stub] = {}
        self._zombies: dict[Process, float] = {}

    @property
    def processes(self) -> list[Process]:
        """The processes of the last observation."""
        return list(self._known)

    def update(self, living: Collection[Stub], states: Mapping[Process, str], now_s: float) -> list[Stub]:
        """Apply an observation and return the stubs that have died and were not replaced.

        Args:
            living: stubs, known before or not; need not be complete.
            states: the kernel's letter for each process of these and of `processes` that still exists.
            now_s: the time of the observation.
        """
        self._known |= {stub.process: stub for stub in living}
        # A process that no longer exists was ended and collected by Triton.
        self._known = {process: stub for process, stub in self._known.items() if process in states}
        self._zombies = {
            process: self._zombies.get(process, now_s) for process in self._known if states[process] == ZOMBIE
        }
        return [
            self._known[process]
            for process, since_s in self._zombies.items()
            if now_s - since_s >= DEAD_AFTER_S and not self._is_replaced(self._known[process])
        ]

    def in_use(self, instance: str) -> list[Stub]:
        """Return the youngest stub of each version that has an instance of this name."""
        named = [stub for stub in self._known.values() if stub.instance == instance]
        return [stub for stub in named if not self._is_replaced(stub)]

    def instances(self, processes: Collection[Process]) -> set[str]:
        """Return the instances whose stub in use is one of the processes."""
        return {stub.instance for stub in self.used(processes)}

    def used(self, processes: Collection[Process]) -> list[Stub]:
        """Return the stubs in use whose process is one of these."""
        found = [self._known[each] for each in processes if each in self._known]
        return [stub for stub in found if not self._is_replaced(stub)]

    def of(self, model: str, versions: Collection[int]) -> list[Stub]:
        """Return all stubs of some versions of a model, dead ones included."""
        return [stub for stub in self.of_model(model) if stub.version in versions]

    def of_model(self, model: str) -> list[Stub]:
        """Return all stubs of a model, dead ones included."""
        return [stub for stub in self._known.values() if stub.model == model]

    def _is_replaced(self, stub: Stub) -> bool:
        return any(
            other.slot == stub.slot
            and other.process not in self._zombies
            and (other.process.started, other.process.pid) > (stub.process.started, stub.process.pid)
            for other in self._known.values()
        )


class Verdicts:
    """Counts how often Triton called an instance unhealthy: one verdict may be a pause of the machine.

    `dead` has the instances with two verdicts in a short time, or one for a stopped process.
    """

    def __init__(self) -> None:
        self.dead: list[str] = []
        self._since: dict[str, list[float]] = {}

    def add(self, instance: str, now_s: float, is_stopped: bool = False) -> bool:
        """Count one verdict; returns whether the instance is now dead."""
        recent = [then for then in self._since.get(instance, ()) if now_s - then < VERDICTS_WITHIN_S]
        self._since[instance] = [*recent, now_s]
        is_dead = bool(recent) or is_stopped
        if is_dead and instance not in self.dead:
            self.dead.append(instance)
        return is_dead

    def clear(self, instance: str) -> None:
        """Remove all verdicts on an instance, such as after its repair."""
        self._since.pop(instance, None)
        if instance in self.dead:
            self.dead.remove(instance)


class LeftOver:
    """Processes of old instances, and the times when they are killed.

    Requests that a dead stub has failed keep the old instances of its model forever (Triton 24.10).
    """

    def __init__(self) -> None:
        self.due_s: dict[Process, float] = {}

    def add(self, processes: Collection[Process], now_s: float) -> None:
        """Add processes that a repair has replaced."""
        self.due_s |= dict.fromkeys(processes, now_s + OLD_STUBS_S)

    def update(self, states: Mapping[Process, str], now_s: float) -> tuple[list[Process], int]:
        """Forget the processes without a state; returns those to kill, and the number of zombies."""
        self.due_s = {each: due_s for each, due_s in self.due_s.items() if each in states}
        running = {each: due_s for each, due_s in self.due_s.items() if states[each] != ZOMBIE}
        return [each for each, due_s in running.items() if due_s < now_s], len(self.due_s) - len(running)


class Retired:
    """Processes of old instances after a change of their number; they end after their last request.

    Triton gives no new request to them, so the death of one is not repaired.
    """

    def __init__(self) -> None:
        self._since: dict[Process, tuple[str, float]] = {}

    def __contains__(self, process: object) -> bool:
        return process in self._since

    def add(self, model: str, processes: Collection[Process], now_s: float) -> None:
        """Add the processes that new instances of a model have replaced."""
        self._since |= dict.fromkeys(processes, (model, now_s))

    def update(self, states: Mapping[Process, str], now_s: float) -> list[Process]:
        """Forget the processes without a state; returns those that Triton will never end.

        A zombie that stays keeps all old instances of its model.
        """
        self._since = {each: about for each, about in self._since.items() if each in states}
        stuck = {
            model
            for each, (model, since_s) in self._since.items()
            if states[each] == ZOMBIE and now_s - since_s > OLD_STUBS_S
        }
        return [each for each, (model, _) in self._since.items() if model in stuck]


def touch(folder: Path) -> bool:
    """Update a version's file times, so that Triton loads it again; returns whether that is permitted."""
    paths = [folder, *folder.rglob("*")]
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime_ns)
    # Triton compares with the newest time it has seen, which may lie in the future.
    newer = max([time.time_ns(), *(each + 1_000_000 for each in times)])
    is_touched = False
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(newer, newer))
            is_touched = True
    return is_touched

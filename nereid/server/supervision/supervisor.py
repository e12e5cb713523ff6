"""Decisions about a running server: which stubs are dead, when to reload a model, when to restart.

A state machine without a clock, threads or effects; `watchdog` feeds it and carries out its commands. A
repair touches the files of the version and reloads the model: Triton then starts new stubs while the old
ones are still running, and moves the requests over.
"""

import contextlib
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from msgspec import Struct

from nereid.backends.triton import stub_processes
from nereid.backends.triton.stub_processes import ZOMBIE, Process, Stub, model_of
from nereid.base.contract import read_unhealthy_instance
from nereid.base.processes import BackOff

# An instance is dead at its second strike, but a probe reaches one of several instances at random.
MAX_ATTEMPTS, MAX_PROBES = 4, 4
REPAIR_DELAYS_S, RESET_AFTER_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0), 30.0
# The longest delay after a repair that Triton accepted, because the model answers again.
MAX_ACCEPTED_S = 5.0
# The server is restarted before the threads of dead instances, about 150 each, use it up.
MAX_DEAD_PROCESSES = 16
# In poll mode, Triton checks for changes every 15 s.
POLL_MODE_DELAY_S = 40.0
PID, PROBE, DEVICE = "pid", "probe", "device"
# Triton reaps a stub that it ended itself within a tenth of this time, which is shorter than the observation
# interval (0.1 s), so the second observation decides.
DEAD_AFTER_S = 0.09
# Maximum time between two strikes: long enough for probes to reach one of many instances twice.
STRIKES_WITHIN_S = 30.0
# Time that Triton has to end the old stubs of a repaired model.
KILL_AFTER_S = 30.0


class FindStubs(Struct, frozen=True):
    """Command: list the server's processes immediately."""


class ProbeSoon(Struct, frozen=True):
    """Command: start the next round of probes immediately."""


class Probe(Struct, frozen=True):
    """Command: send an image to a model."""

    model: str
    number: int
    attempt: int = 1


class ReadIndex(Struct, frozen=True):
    """Command: read the server's index for a repair."""


class Reload(Struct, frozen=True):
    """Command: make Triton start new stubs for versions of a model."""

    model: str
    versions: frozenset[int]
    cause: str


class Kill(Struct, frozen=True):
    """Command: kill a process."""

    process: Process


class ReportBroken(Struct, frozen=True):
    """Command: publish the broken models, each with the reason."""

    models: Mapping[str, str]


class Log(Struct, frozen=True):
    """Command: log a line."""

    text: str


class End(Struct, frozen=True):
    """Command: stop supervising; `reason` says why the server must be restarted, empty if it has exited."""

    reason: str = ""


Command = FindStubs | ProbeSoon | Probe | ReadIndex | Reload | Kill | ReportBroken | Log | End
Commands = list[Command]


class KnownStubs:
    """Known stubs, and which of them have died, from successive observations.

    A killed stub remains as a zombie; one that Triton ends is reaped within milliseconds.
    """

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
            states: the kernel's state letter for each of these and of `processes` that still exists.
        """
        self._known |= {stub.process: stub for stub in living}
        # A process that no longer exists was ended and reaped by Triton.
        self._known = {process: stub for process, stub in self._known.items() if process in states}
        self._zombies = {
            process: self._zombies.get(process, now_s) for process in self._known if states[process] == ZOMBIE
        }
        return [
            self._known[process]
            for process, since in self._zombies.items()
            if now_s - since >= DEAD_AFTER_S and not self._is_replaced(self._known[process])
        ]

    def find_active(self, instance: str) -> list[Stub]:
        """Return the youngest stub of each version that has an instance of this name."""
        named = [stub for stub in self._known.values() if stub.instance == instance]
        return [stub for stub in named if not self._is_replaced(stub)]

    def filter_active(self, processes: Collection[Process]) -> list[Stub]:
        """Return the stubs in use whose process is one of these."""
        stubs = [self._known[process] for process in processes if process in self._known]
        return [stub for stub in stubs if not self._is_replaced(stub)]

    def stubs_of_versions(self, model: str, versions: Collection[int]) -> list[Stub]:
        """Return all stubs of some versions of a model, dead ones included."""
        return [stub for stub in self.stubs_of_model(model) if stub.version in versions]

    def stubs_of_model(self, model: str) -> list[Stub]:
        """Return all stubs of a model, dead ones included."""
        return [stub for stub in self._known.values() if stub.model == model]

    def _is_replaced(self, stub: Stub) -> bool:
        return any(
            other.instance_key == stub.instance_key
            and other.process not in self._zombies
            and (other.process.start_ticks, other.process.pid) > (stub.process.start_ticks, stub.process.pid)
            for other in self._known.values()
        )


class ProbeStrikes:
    """Counts how often Triton called an instance unhealthy: once may just mean that the machine paused.

    `dead` contains the instances with two strikes in a short time, or one for a stopped process.
    """

    def __init__(self) -> None:
        self.dead: dict[str, None] = {}
        self._last_at: dict[str, float] = {}

    def add(self, instance: str, now_s: float, is_stopped: bool = False) -> bool:
        """Count a strike; return whether the instance is now dead."""
        is_dead = is_stopped or now_s - self._last_at.get(instance, -inf) < STRIKES_WITHIN_S
        self._last_at[instance] = now_s
        if is_dead:
            self.dead[instance] = None
        return is_dead

    def clear(self, instance: str) -> None:
        """Remove all strikes of an instance, for example after its repair."""
        self._last_at.pop(instance, None)
        self.dead.pop(instance, None)


class OldProcesses:
    """Processes of old instances, to which Triton sends no new requests.

    After a change of the number of instances, the replaced processes exit after their last request, and one
    that dies is not repaired. After a repair, they may not: requests that failed on a dead stub keep its
    model's old instances alive forever (Triton 24.10). `kill_at` maps such processes to the time.
    """

    def __init__(self) -> None:
        self.kill_at: dict[Process, float] = {}
        self._replaced: dict[Process, tuple[str, float]] = {}

    def is_replaced(self, process: Process) -> bool:
        """Return whether a change of the number of instances has replaced a process."""
        return process in self._replaced

    def add_replaced(self, model: str, processes: Collection[Process], now_s: float) -> None:
        """Add the processes of a model that a change of its number of instances has replaced."""
        self._replaced |= dict.fromkeys(processes, (model, now_s))

    def add_repaired(self, processes: Collection[Process], now_s: float) -> None:
        """Add the processes that a repair has replaced, to be killed after a while."""
        self.kill_at |= dict.fromkeys(processes, now_s + KILL_AFTER_S)

    def update(self, states: Mapping[Process, str], now_s: float) -> tuple[list[Process], int]:
        """Forget the processes without a state; return those to kill now, and the number of zombies."""
        self._replaced = {process: about for process, about in self._replaced.items() if process in states}
        # A zombie that remains keeps all old instances of its model alive.
        stuck = {
            model
            for process, (model, since) in self._replaced.items()
            if states[process] == ZOMBIE and now_s - since > KILL_AFTER_S
        }
        for process, (model, _) in self._replaced.items():
            if model in stuck:
                self.kill_at.setdefault(process, now_s + KILL_AFTER_S)
        self.kill_at = {process: due_at for process, due_at in self.kill_at.items() if process in states}
        running = {process: due_at for process, due_at in self.kill_at.items() if states[process] != ZOMBIE}
        late = [process for process, due_at in running.items() if due_at < now_s]
        return late, len(self.kill_at) - len(running)


def touch(folder: Path) -> bool:
    """Update a version's file times so that Triton reloads it; return whether that is permitted."""
    paths = [folder, *folder.rglob("*")]
    times = []
    for path in paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime_ns)
    # Triton compares with the newest time it has seen, which may lie in the future.
    newer = max([time.time_ns(), *(time_ns + 1_000_000 for time_ns in times)])
    is_touched = False
    for path in paths:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(newer, newer))
            is_touched = True
    return is_touched


@dataclass(slots=True)
class _RepairHistory:
    """Past repairs of one model."""

    back_off: BackOff = field(default_factory=lambda: BackOff(REPAIR_DELAYS_S, RESET_AFTER_S))
    # When its processes were last replaced, by a repair or a change of their number.
    renewed_at: float = float("-inf")
    not_before: float = float("-inf")
    # The processes before the last repair that Triton accepted.
    former: list[Process] = field(default_factory=list)


@dataclass(slots=True)
class _Repair:
    """The running repair; only one runs at a time."""

    order: Reload
    started_at: float
    old: list[Process]
    pause_s: float


class Supervisor:
    """The state of one supervised server; not thread-safe. Model control mode `none` allows no repairs."""

    def __init__(self, model_control_mode: str) -> None:
        self._mode = model_control_mode
        self._stubs, self._strikes = KnownStubs(), ProbeStrikes()
        self._models: dict[str, _RepairHistory] = {}
        self._image_models: Collection[str] = ()
        self._dead: list[Stub] = []
        # Processes whose device failed: they still run, but reject every request.
        self._failed: list[Stub] = []
        self._reported: set[Process] = set()
        self._stopped: set[str] = set()
        self._old = OldProcesses()
        self._pending: dict[int, str] = {}
        self._probes = 0
        self._is_repairing = False
        self._repair: _Repair | None = None
        self._has_ended = False
        self.ready: dict[str, set[int]] | None = None

    @property
    def processes(self) -> set[Process]:
        """The processes whose states the next call of `see` needs."""
        return {*self._stubs.processes, *self._old.kill_at}

    def processes_of(self, model: str) -> list[Process]:
        """Return the processes of a model, without those that a change of its instances has replaced."""
        processes = [stub.process for stub in self._stubs.stubs_of_model(model)]
        return [process for process in processes if not self._old.is_replaced(process)]

    def is_emptied(self, living: Collection[Stub]) -> bool:
        """Return whether only instances remain that a stopping server never ends."""
        left_over = self._old.kill_at.keys()
        return bool(left_over) and all(stub.process in left_over for stub in living)

    def see(
        self,
        states: Mapping[Process, str],
        found: Collection[Stub] | None,
        failed: Collection[int],
        now_s: float,
    ) -> Commands:
        """Apply an observation at a monotonic time; return the commands that follow, in order.

        Other methods that return commands return them in order, too.

        Args:
            states: the states of the known processes.
            found: the living stubs; None if they were not listed.
            failed: pids that have reported a failed device since the last observation.
        """
        dead = [stub for stub in self._stubs.update(found or (), states, now_s) if self._is_served(stub)]
        processes = self._stubs.processes
        self._reported = {
            process for process in processes if process in self._reported or process.pid in failed
        }
        self._failed = [stub for stub in self._stubs.filter_active(self._reported) if self._is_served(stub)]
        late, count = self._old.update(states, now_s)
        commands: Commands = [Kill(process) for process in late]
        if dead and found is None:  # a new stub may have taken its place meanwhile
            return [*commands, FindStubs(), *self._seek_repair(now_s)]
        self._dead = dead
        # A repair would not free them.
        count += sum(stub.process not in self._old.kill_at for stub in dead)
        if count >= MAX_DEAD_PROCESSES:
            commands += self.end(f"{count} dead instances still occupy its threads and memory")
        stopped = {process for process, state in states.items() if state == stub_processes.STOPPED}
        in_use = self._stubs.filter_active(stopped - self._old.kill_at.keys())
        self._stopped = {stub.instance for stub in in_use if not self._old.is_replaced(stub.process)}
        broken = {stub.model: f"the device of '{stub.instance}' failed" for stub in self._failed}
        broken |= {stub.model: f"the process of '{stub.instance}' is dead" for stub in dead}
        if self._repair:  # a new stub runs for a second before it can respond
            broken[self._repair.order.model] = "is being loaded again"
        commands.append(ReportBroken(broken))
        if any(model_of(instance) in self._image_models for instance in self._stopped):
            commands.append(ProbeSoon())
        return commands + self._seek_repair(now_s)

    def start_round(
        self, ready: dict[str, set[int]], image_models: Collection[str], due: Collection[str]
    ) -> Commands:
        """Start a round of probes.

        Args:
            ready: the ready versions by model.
            image_models: the models that take images.
            due: those to probe.
        """
        self.ready, self._image_models = ready, image_models
        commands: Commands = []
        for model in image_models:
            # Triton sends requests that arrive together to different instances.
            is_suspected = any(model_of(instance) == model for instance in self._stopped)
            probe_count = self._instances(model) if is_suspected else int(model in due)
            for _ in range(probe_count - list(self._pending.values()).count(model)):
                self._probes += 1
                self._pending[self._probes] = model
                commands.append(Probe(model, self._probes))
        return commands

    def end_probe(self, probe: Probe, failure: str | None, started_at: float, now_s: float) -> Commands:
        """Judge a probe that began at `started_at`; `failure` is None on success."""
        instance = read_unhealthy_instance(failure or "")
        if instance and self._is_news(instance, started_at):
            is_dead = self._strikes.add(instance, now_s, is_stopped=instance in self._stopped)
            if not is_dead and probe.attempt < MAX_ATTEMPTS:
                again = Probe(probe.model, probe.number, probe.attempt + 1)
                return [again, *self._seek_repair(now_s)]
        if failure and not instance:
            self._blame_stopped(probe.model, started_at, now_s)
        self._pending.pop(probe.number, None)
        return self._seek_repair(now_s)

    def start_repair(self, ready: Mapping[str, set[int]], now_s: float) -> Commands:
        """Repair a model, given the ready versions by model from the server's index."""
        self._is_repairing = False
        for cause, stubs in ((PID, self._dead), (DEVICE, self._failed)):
            for model in {stub.model for stub in stubs}:
                versions = {stub.version for stub in stubs if stub.model == model} & ready.get(model, set())
                if not versions or now_s < self._of(model).not_before:
                    continue
                former = self._of(model).former
                if all(stub.process in former for stub in stubs if stub.model == model) and (
                    changed := self._mark_former_replaced(model, versions, now_s)
                ):
                    return changed
                return self._order(Reload(model, frozenset(versions), cause), now_s)
        for instance in list(self._strikes.dead):
            in_use = self._stubs.find_active(instance)
            model = in_use[0].model if in_use else model_of(instance)
            if now_s < self._of(model).not_before:
                continue
            self._strikes.clear(instance)
            served = ready.get(model, set())
            versions = {stub.version for stub in in_use} & served or served
            # It is unknown which of several processes hangs.
            kills: Commands = [Kill(in_use[0].process)] if len(in_use) == 1 else []
            if versions:
                return kills + self._order(Reload(model, frozenset(versions), PROBE), now_s)
            return kills
        return []

    def end_repair(self, refusal: str, now_s: float) -> Commands:
        """Record that Triton has reloaded the model of `Reload`, or refused to for the reason `refusal`."""
        repair = self._repair
        assert repair is not None, "no model is being loaded"
        order = repair.order
        pause_s = repair.pause_s if refusal else min(repair.pause_s, MAX_ACCEPTED_S)
        named = f"model '{order.model}' version {', '.join(map(str, sorted(order.versions)))}"
        took_s = now_s - repair.started_at
        fault = "a failed device" if order.cause == DEVICE else "a dead stub"
        detection = "" if order.cause == DEVICE else f" (found by {order.cause})"
        text = f"{named} had {fault}{detection}: loaded again in {took_s:.1f} s"
        if refusal:
            text = f"{named} has {fault} and cannot be loaded: {refusal}; next try in {pause_s:g} s"
        elif pause_s > REPAIR_DELAYS_S[0]:
            text += f"; it was repaired recently, so the next repair waits for {pause_s:g} s"
        wait_s = max(pause_s, POLL_MODE_DELAY_S) if self._mode == "poll" else pause_s
        self._of(order.model).not_before = now_s + wait_s
        self._close_repair(now_s, is_refused=bool(refusal))
        commands: Commands = [Log(text)]
        if not refusal:
            self._of(order.model).former = repair.old
            if self._mode == "explicit":  # in poll mode, the load has not happened yet
                commands += self._mark_former_replaced(order.model, order.versions, now_s)
        return commands + self._seek_repair(now_s)

    def interrupt_repair(self, now_s: float) -> Commands:
        """Record that `ReadIndex` or `Reload` ended without a response."""
        self._close_repair(now_s)
        return []

    def change_instances(self, model: str, old: Collection[Process], now_s: float) -> Commands:
        """Record that Triton changed a model's number of instances; the processes `old` will exit."""
        self._old.add_replaced(model, old, now_s)
        self._renewed(model, now_s)
        return []

    def end(self, reason: str = "") -> Commands:
        """End the supervision: the server must be restarted for this reason; without one, it has ended."""
        if self._has_ended:
            return []
        self._has_ended = True
        return [End(reason)]

    def _is_served(self, stub: Stub) -> bool:
        is_ready = self.ready is None or stub.version in self.ready.get(stub.model, ())
        return is_ready and not self._old.is_replaced(stub.process)

    def _instances(self, model: str) -> int:
        stubs = self._stubs.stubs_of_versions(model, (self.ready or {}).get(model, ()))
        return min(MAX_PROBES, len({stub.instance for stub in stubs}))

    def _blame_stopped(self, model: str, started_at: float, now_s: float) -> None:
        """Blame a model's stopped processes for a failed probe: Triton may hang on them but name none."""
        for instance in self._stopped:
            if model_of(instance) == model and self._is_news(instance, started_at):
                self._strikes.add(instance, now_s, is_stopped=True)

    def _is_news(self, instance: str, started_at: float) -> bool:
        """Return whether a failure is new: neither known nor older than the last repair."""
        model = model_of(instance)
        is_in_repair = self._repair is not None and self._repair.order.model == model
        is_known = is_in_repair or any(instance == stub.instance for stub in self._dead)
        return not is_known and started_at >= self._of(model).renewed_at

    def _seek_repair(self, now_s: float) -> Commands:
        models = {stub.model for stub in (*self._dead, *self._failed)} | {
            model_of(instance) for instance in self._strikes.dead
        }
        is_due = any(now_s >= self._of(model).not_before for model in models)
        if self._is_repairing or self._has_ended or not is_due:
            return []
        self._is_repairing = True
        return [ReadIndex()]

    def _mark_former_replaced(self, model: str, versions: Collection[int], now_s: float) -> Commands:
        """Give up processes from before the last repair if others run; report a changed instance count."""
        former, in_use = self._of(model).former, self._stubs.stubs_of_versions(model, versions)
        of_former = [stub for stub in in_use if stub.process in former]
        replaced = [stub for stub in of_former if not self._old.is_replaced(stub.process)]
        old = {stub.instance_key for stub in replaced}
        new = {stub.instance_key for stub in in_use if stub.process not in former}
        if not new:
            return []
        self._old.add_replaced(model, former, now_s)
        lost = ", ".join(sorted(instance for _, _, instance in old - new))
        change = f"{len(new)} instance(s) instead of {len(old)}"
        return [Log(f"model '{model}' has {change}: the repair started no new {lost}")] if lost else []

    def _order(self, reload: Reload, now_s: float) -> Commands:
        model = self._of(reload.model)
        old = [stub.process for stub in self._stubs.stubs_of_versions(reload.model, reload.versions)]
        if self._mode == "none":  # left over, or the server would wait for them when it stops
            self._old.add_repaired(old, now_s)
            return self.end(f"a stub of '{reload.model}' died, and this mode does not allow loading models")
        pause_s = model.back_off.record_failure(now_s)
        self._is_repairing, self._repair = True, _Repair(reload, now_s, old, pause_s)
        return [reload]

    def _close_repair(self, now_s: float, is_refused: bool = False) -> None:
        repair, self._repair, self._is_repairing = self._repair, None, False
        if repair is None:
            return
        model = repair.order.model
        # The pause itself is not calm time: a repair after the longest pause does not start with the first.
        self._of(model).back_off.record_start(max(now_s, self._of(model).not_before))
        self._renewed(model, now_s)
        dead = {stub.process for stub in self._dead}
        # After a refusal, the healthy stubs are still in use.
        replaced = [process for process in repair.old if process in dead or not is_refused]
        self._old.add_repaired(replaced, now_s)

    def _renewed(self, model: str, now_s: float) -> None:
        """Forget what is known about the former processes of a model."""
        self._of(model).renewed_at = now_s
        # Probes of old instances may run until they time out.
        self._pending = {number: of for number, of in self._pending.items() if of != model}
        for instance in [*self._strikes.dead]:
            if model_of(instance) == model:
                self._strikes.clear(instance)

    def _of(self, model: str) -> _RepairHistory:
        return self._models.setdefault(model, _RepairHistory())

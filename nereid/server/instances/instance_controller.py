"""The loop that adapts the numbers of instances of a running server to its load."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from nereid.backends.triton.stub_processes import Process
from nereid.base import metrics_page
from nereid.base.config.instance_bounds import BOUNDS, InstanceBounds, read_bounds
from nereid.base.config.model_config import CONFIGS, read_profile
from nereid.base.metrics_page import Snapshot
from nereid.base.processes import available_bytes
from nereid.base.serving_errors import InvalidConfig
from nereid.server.control import NOT_LOADED, Control, Instances, Refused
from nereid.server.instances.instance_decision import Decision, GpuSample, InstanceDecider, Sample
from nereid.server.instances.instance_readings import PREFIXES, CpuWait, Load, read_gpu, read_loads
from nereid.server.run_dir import ServerRecord
from nereid.server.supervision.health import Health
from nereid.server.supervision.process_usage import memory_bytes

SAMPLE_S, TIMEOUT_S = 0.2, 2.0
# Other commands load models, too, and the memory of a process takes 1 to 3 ms to read.
NUMBER_S, MEMORY_S = 2.0, 10.0
# Without a model that has bounds.
IDLE_S = 2.0


@dataclass(slots=True)
class _Model:
    """The last readings of one model with bounds, and its decisions."""

    decider: InstanceDecider
    cpu: CpuWait = field(default_factory=CpuWait)
    served: Instances = NOT_LOADED
    number_read_s: float = float("-inf")
    instance_bytes: float = 0.0
    memory_read_s: float = float("-inf")
    blocked: str = ""


class InstanceController:
    """Adapts the numbers of instances of one server; `discover` and `step` may have a thread each.

    Args:
        record: the running server.
        health: receives the numbers and changes.
        processes_of: returns the processes of a model.
        change: loads a model with a number of instances, or raises `Refused`.
        log: receives one line for each change.
    """

    def __init__(
        self,
        record: ServerRecord,
        health: Health,
        processes_of: Callable[[str], list[Process]],
        change: Callable[[str, int], None],
        log: Callable[[str], None],
    ) -> None:
        self._record, self._control, self._health = record, Control(record), health
        self._processes_of, self._change, self._log = processes_of, change, log
        self._bounds: dict[str, InstanceBounds] = {}
        self._read: dict[str, tuple[int, InstanceBounds | None]] = {}
        self._models: dict[str, _Model] = {}
        self._page: Snapshot | None = None
        self._page_s = 0.0

    def discover(self, models: Collection[str]) -> bool:
        """Read the bounds of the models whose config has changed; returns whether any model has bounds."""
        before, self._read = self._read, {}
        for name in models:
            changed_ns, known = self._config_time(name), before.get(name, (-1, None))
            is_known = known[0] == changed_ns
            self._read[name] = known if is_known else (changed_ns, self._read_bounds(name, known[1]))
        self._bounds = {name: bounds for name, (_, bounds) in self._read.items() if bounds}
        return bool(self._bounds)

    def step(self) -> float:
        """Take one sample of each model with bounds, and change a number; returns the seconds to wait.

        Raises:
            OSError: Triton's metrics cannot be read.
            NotReached: the server does not respond.
        """
        began_s, bounds = time.monotonic(), self._bounds
        self._models = {
            name: self._models.get(name) or _Model(InstanceDecider(each)) for name, each in bounds.items()
        }
        if not bounds:
            self._health.instances_seen({})
            return IDLE_S
        text = metrics_page.fetch(self._record.url("metrics"), TIMEOUT_S)
        before, self._page = self._page, Snapshot.parse(text, PREFIXES)
        seconds, self._page_s = time.monotonic() - self._page_s, time.monotonic()
        loads = read_loads(self._page, self._page - (before or self._page), seconds)
        gpu = read_gpu(self._page)
        for name, model in self._models.items():
            model.decider.bounds = bounds[name]
            sample = self._sample(name, model, loads.get(name), gpu)
            if sample and (decision := model.decider.look(sample)):
                self._carry_out(name, model, decision)
            self._tell_blocked(name, model)
        self._health.instances_seen({name: model.served.count for name, model in self._models.items()})
        return max(0.0, SAMPLE_S - (time.monotonic() - began_s))

    def _sample(self, name: str, model: _Model, load: Load | None, gpu: GpuSample | None) -> Sample | None:
        """Return the state of a model; None if it is not loaded."""
        now_s = time.monotonic()
        processes = [process.pid for process in self._processes_of(name)]
        if now_s - model.number_read_s >= NUMBER_S:
            model.served, model.number_read_s = self._control.instances(name), now_s
        if now_s - model.memory_read_s >= MEMORY_S and model.served.count:
            model.instance_bytes = sum(memory_bytes(pid) for pid in processes) / model.served.count
            model.memory_read_s = now_s if model.instance_bytes else float("-inf")
        cpu_wait = model.cpu.read(processes)
        if not model.served.count or not load:
            return None
        return Sample(
            now_s,
            model.served.count,
            load.waiting,
            load.busy,
            cpu_wait,
            available_bytes(),
            model.instance_bytes,
            gpu if model.served.is_on_gpu else None,
        )

    def _carry_out(self, name: str, model: _Model, decision: Decision) -> None:
        began_s, before, refusal = time.monotonic(), model.served.count, ""
        try:
            self._change(name, decision.count)
        except Refused as error:
            refusal = str(error)
        ended_s = time.monotonic()
        model.decider.changed(ended_s, is_refused=bool(refusal))
        model.blocked = ""
        model.number_read_s = model.memory_read_s = float("-inf")
        self._health.instances_changed(name, "up" if decision.count > before else "down", bool(refusal))
        text = f"instances of '{name}': {before} → {decision.count} of {model.decider.bounds}"
        took = (
            f"failed after {ended_s - began_s:.1f} s ({refusal})" if refusal else f"{ended_s - began_s:.1f} s"
        )
        self._log(f"{text}, {took}: {decision.reason}")

    def _tell_blocked(self, name: str, model: _Model) -> None:
        """Log once per change why a model gets no instance although requests wait."""
        reason = model.decider.blocked
        if reason and not model.blocked:
            number = f"{model.served.count} of {model.decider.bounds}"
            self._log(f"instances of '{name}' stay {number}, although requests wait: {reason}")
        model.blocked = reason or model.blocked

    def _config_time(self, name: str) -> int:
        """Return when the config of a model changed, in nanoseconds; 0 without one."""
        folder = Path(self._record.repository) / name
        for path in (folder / CONFIGS / f"{self._record.profile}.pbtxt", folder / "config.pbtxt"):
            try:
                return path.stat().st_mtime_ns
            except OSError:
                continue
        return 0

    def _read_bounds(self, name: str, known: InstanceBounds | None) -> InstanceBounds | None:
        """Return the bounds of a config, or those that are known while it cannot be read."""
        try:
            return read_bounds(read_profile(Path(self._record.repository) / name, self._record.profile))
        except (InvalidConfig, OSError) as error:
            if known or BOUNDS in str(error):
                self._log(f"instances of '{name}' keep their bounds ({known or 'none'}): {error}")
            return known

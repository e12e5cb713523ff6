"""Models whose number of instances follows the load: readings, decisions and changes."""

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from nereid.backends.triton.stub_processes import PROC, Process
from nereid.base import prometheus_text
from nereid.base.config.instance_bounds import BOUNDS, InstanceBounds, read_bounds
from nereid.base.config.model_config import config_path, read_config
from nereid.base.errors import InvalidConfig
from nereid.base.processes import BackOff, available_bytes
from nereid.base.prometheus_text import MetricSamples
from nereid.base.units import format_bytes
from nereid.server.model_control import NOT_LOADED, Instances, ModelControl, Refused
from nereid.server.run_dir import ServerInfo
from nereid.server.supervision.health import ServerHealth
from nereid.server.supervision.process_usage import core_wait_s, memory_bytes

# An instance is added after this many samples in a row in which requests waited: about a second.
ADD_SAMPLES, WAITING = 5, 1.0
# Every change restarts all instances, so the next change waits until the old instances have exited.
COOLDOWN_S = 2.0
REFUSED_DELAYS_S, RESET_AFTER_S = (2.0, 5.0, 15.0, 60.0), 300.0
# Fraction of time that the model's processes wait for a core. With as many busy threads as cores it is below
# 0.1; a third process on two cores waits a third of the time.
CPU_FULL, GPU_FULL = 0.25, 0.9
# Requests and other programs need the rest of the free memory.
FREE_MEMORY_FRACTION = 0.8
# Maximum fraction of time that the remaining instances would be busy.
STAYING_BUSY = 0.5
INFERENCE = ("request_success", "exec_count", "compute_", "pending_request_count")
PREFIXES = (*(f"nv_inference_{name}" for name in INFERENCE), "nv_gpu_")
US_PER_S = 1e6
SAMPLE_INTERVAL_S, TIMEOUT_S = 0.2, 2.0
# Other commands also load models, and reading a process's memory use takes 1 to 3 ms.
COUNT_INTERVAL_S, MEMORY_INTERVAL_S = 2.0, 10.0
# While no model has bounds.
IDLE_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class GpuSample:
    """The fullest GPU: the fraction of time it is busy, 0 to 1, and its memory in bytes."""

    busy: float
    free_bytes: float
    used_bytes: float


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The state of a model at one moment, and its work since the previous sample.

    Args:
        instances: the current number, for each version.
        waiting: requests now waiting for an instance, for the version with the most.
        busy: mean number of busy instances of the busiest version.
        cpu_wait: fraction of the time that a process of the model waited for a core, 0 to 1.
        instance_bytes: memory of one instance of all versions; 0 if unknown.
        gpu: the fullest GPU, for instances on a GPU.
    """

    at: float
    instances: int
    waiting: float
    busy: float
    cpu_wait: float
    free_bytes: float
    instance_bytes: float
    gpu: GpuSample | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A new number of instances, and the reason in plain words."""

    count: int
    reason: str


class InstanceAutoscaler:
    """Decides for one model: adds an instance once requests keep waiting, removes one after a long idle time.

    `blocked` says why no instance is added although requests are waiting; empty otherwise.
    """

    def __init__(self, bounds: InstanceBounds) -> None:
        self.bounds = bounds
        self.blocked = ""
        self._back_off = BackOff(REFUSED_DELAYS_S, RESET_AFTER_S)
        self._not_before = float("-inf")
        self._start_again()

    def decide(self, sample: LoadSample) -> Decision | None:
        """Return the change that this and the previous samples call for; None for no change."""
        if sample.at < self._not_before:
            return None
        nearest = self.bounds.nearest(sample.instances)
        if nearest != sample.instances:
            return Decision(nearest, f"{sample.instances} is outside of the bounds")
        return self._scale_up(sample) or self._scale_down(sample)

    def record_change(self, now_s: float, is_refused: bool = False) -> None:
        """Record that a change has ended, at a time on the samples' clock."""
        self._not_before = now_s + (self._back_off.record_failure(now_s) if is_refused else COOLDOWN_S)
        self._back_off.record_start(now_s)
        self._start_again()

    def _start_again(self) -> None:
        self._waits: list[LoadSample] = []
        self._quiet_since: float | None = None
        self._sampled_at = self._busy_s = 0.0
        self.blocked = ""

    def _scale_up(self, sample: LoadSample) -> Decision | None:
        if sample.waiting < WAITING:
            self._waits, self.blocked = [], ""
            return None
        self._waits = [*self._waits, sample][-ADD_SAMPLES:]
        if len(self._waits) < ADD_SAMPLES or sample.instances >= self.bounds.high:
            return None
        self.blocked = _full_processor(self._waits) or _full_memory(sample, sample.instances + 1)
        if self.blocked:
            return None
        waiting = fmean(earlier.waiting for earlier in self._waits)
        seconds = sample.at - self._waits[0].at
        return Decision(sample.instances + 1, f"{waiting:.1f} requests waited for {seconds:.1f} s")

    def _scale_down(self, sample: LoadSample) -> Decision | None:
        count, now_s = sample.instances, sample.at
        if sample.waiting >= WAITING or count <= self.bounds.low:
            self._quiet_since = None
            return None
        if self._quiet_since is None:
            self._quiet_since, self._sampled_at, self._busy_s = now_s, now_s, 0.0
        self._busy_s += sample.busy * (now_s - self._sampled_at)
        self._sampled_at, quiet_s = now_s, now_s - self._quiet_since
        if quiet_s < self.bounds.idle_s:
            return None
        self._quiet_since = None
        busy = self._busy_s / quiet_s
        if busy > STAYING_BUSY * (count - 1) or _full_memory(sample, count - 1):
            return None
        return Decision(count - 1, f"{busy:.1f} of {count} instances were busy for {quiet_s:.0f} s")


def _full_processor(samples: list[LoadSample]) -> str:
    """Return why no processor is free for another instance; empty if one is."""
    cpu_wait = fmean(sample.cpu_wait for sample in samples)
    if cpu_wait >= CPU_FULL:
        return f"its processes wait for a core {cpu_wait:.0%} of the time"
    gpus = [sample.gpu.busy for sample in samples if sample.gpu]
    if gpus and fmean(gpus) >= GPU_FULL:
        return f"the GPU is busy {fmean(gpus):.0%} of the time"
    return ""


def _full_memory(sample: LoadSample, count: int) -> str:
    """Return why memory cannot hold `count` new instances beside the old ones; empty if it can."""
    rows = [("memory", sample.free_bytes, sample.instance_bytes)]
    if sample.gpu:  # the model's part of the used memory is unknown, but at most all of it
        rows.append(("memory of the GPU", sample.gpu.free_bytes, sample.gpu.used_bytes / sample.instances))
    for name, free, of_instance in rows:
        if (needed := count * of_instance / FREE_MEMORY_FRACTION) > free:
            return f"expected {format_bytes(int(needed))} of free {name}, got {format_bytes(int(free))}"
    return ""


def read_loads(
    page: MetricSamples, increase: MetricSamples, seconds: float
) -> dict[str, tuple[float, float]]:
    """Return `waiting` and `busy` of `LoadSample` for each loaded model.

    Args:
        page: Triton's metrics page.
        increase: its increase over `seconds`.
    """

    def increase_of(name: str) -> dict[tuple[str, ...], float]:
        return increase.sums(f"nv_inference_{name}", "model", "version")

    requests, executions = increase_of("request_success"), increase_of("exec_count")
    parts = [increase_of(f"compute_{part}_duration_us") for part in ("input", "infer", "output")]
    waiting = page.sums("nv_inference_pending_request_count", "model", "version")
    loads: dict[str, tuple[float, float]] = {}
    for version, answered in requests.items():
        # Each request counts the whole computing time of its batch.
        batches = min(1.0, executions.get(version, 0.0) / answered) if answered else 0.0
        compute_s = sum(part.get(version, 0.0) for part in parts) / US_PER_S
        most_waiting, most_busy = loads.get(version[0], (0.0, 0.0))
        loads[version[0]] = (
            max(most_waiting, waiting.get(version, 0.0)),
            max(most_busy, compute_s * batches / seconds),
        )
    return loads


def read_gpu(page: MetricSamples) -> GpuSample | None:
    """Return the highest use and the least free memory of any GPU, as if they were one GPU's."""
    busy, total, used = (
        page.sums(f"nv_gpu_{name}", "gpu_uuid")
        for name in ("utilization", "memory_total_bytes", "memory_used_bytes")
    )
    if not busy and not total:
        return None
    free = [total[gpu] - used.get(gpu, 0.0) for gpu in total]
    return GpuSample(max(busy.values(), default=0.0), min(free, default=0.0), max(used.values(), default=0.0))


class CpuWait:
    """The fraction of time that the processes of a model wait for a core, between two readings.

    If the kernel does not count this, or the model has no processes, the machine's CPU pressure is used.
    """

    def __init__(self, proc: Path = PROC, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock, self._read_at = proc, clock, clock()
        self._waited_s: dict[int, float] = {}
        self._pressed_s: float | None = None

    def read(self, pids: Collection[int]) -> float:
        """Return the mean over the processes since the last call, 0 to 1."""
        seconds, self._read_at = self._clock() - self._read_at, self._clock()
        before, self._waited_s = self._waited_s, dict[int, float]()
        for pid in pids:
            if (waited_s := core_wait_s(pid, self._proc)) is not None:
                self._waited_s[pid] = waited_s
        waits_s = [max(0.0, self._waited_s[pid] - before[pid]) for pid in self._waited_s.keys() & before]
        pressed_s = 0.0 if self._waited_s else self._pressure_s()
        if not self._waited_s:
            waits_s = [pressed_s - self._pressed_s] if self._pressed_s is not None else []
            self._pressed_s = pressed_s
        return min(1.0, sum(waits_s) / len(waits_s) / seconds) if waits_s and seconds > 0 else 0.0

    def _pressure_s(self) -> float:
        """Return the seconds in which some thread of the machine waited for a core; 0 if not counted.

        Source: Linux, Documentation/accounting/psi.rst.
        """
        with contextlib.suppress(OSError, ValueError):
            line = (self._proc / "pressure" / "cpu").read_text().splitlines()[0]
            return int(line.rpartition("total=")[2]) / US_PER_S
        return 0.0


@dataclass(slots=True)
class _ScaledModel:
    autoscaler: InstanceAutoscaler
    cpu: CpuWait = field(default_factory=CpuWait)
    served_instances: Instances = NOT_LOADED
    count_read_at: float = float("-inf")
    instance_bytes: float = 0.0
    memory_read_at: float = float("-inf")
    blocked: str = ""


class InstanceController:
    """Adapts the numbers of instances of one server; `discover` and `step` may each run in a thread.

    Args:
        change: loads a model with a number of instances, or raises `Refused`.
    """

    def __init__(
        self,
        server_info: ServerInfo,
        health: ServerHealth,
        processes_of: Callable[[str], list[Process]],
        change: Callable[[str, int], None],
        log: Callable[[str], None],
    ) -> None:
        self._server_info, self._model_control, self._health = server_info, ModelControl(server_info), health
        self._processes_of, self._change, self._log = processes_of, change, log
        self._bounds: dict[str, InstanceBounds] = {}
        self._read: dict[str, tuple[int, InstanceBounds | None]] = {}
        self._models: dict[str, _ScaledModel] = {}
        self._page: MetricSamples | None = None
        self._page_read_at = 0.0

    def discover(self, models: Collection[str]) -> bool:
        """Read the bounds of the models whose config has changed; returns whether any model has bounds."""
        self._read = {name: self._read_config(name) for name in models}
        self._bounds = {name: bounds for name, (_, bounds) in self._read.items() if bounds}
        return bool(self._bounds)

    def step(self) -> float:
        """Take one sample of each model with bounds, and change a number; return the seconds to wait.

        Raises:
            OSError: Triton's metrics cannot be read.
            NotReached: the server does not respond.
        """
        started_at, bounds = time.monotonic(), self._bounds
        self._models = {
            name: self._models.get(name) or _ScaledModel(InstanceAutoscaler(limits))
            for name, limits in bounds.items()
        }
        if not bounds:
            self._health.record_instances({})
            return IDLE_INTERVAL_S
        text = prometheus_text.fetch(self._server_info.url("metrics"), TIMEOUT_S)
        before, self._page = self._page, MetricSamples.parse(text, PREFIXES)
        seconds, self._page_read_at = time.monotonic() - self._page_read_at, time.monotonic()
        loads = read_loads(self._page, self._page - (before or self._page), seconds)
        gpu = read_gpu(self._page)
        for name, model in self._models.items():
            model.autoscaler.bounds = bounds[name]
            sample = self._sample(name, model, loads.get(name), gpu)
            if sample and (decision := model.autoscaler.decide(sample)):
                self._carry_out(name, model, decision)
            self._log_blocked_once(name, model)
        self._health.record_instances(
            {name: model.served_instances.count for name, model in self._models.items()}
        )
        return max(0.0, SAMPLE_INTERVAL_S - (time.monotonic() - started_at))

    def _sample(
        self, name: str, model: _ScaledModel, load: tuple[float, float] | None, gpu: GpuSample | None
    ) -> LoadSample | None:
        now_s = time.monotonic()
        processes = [process.pid for process in self._processes_of(name)]
        if now_s - model.count_read_at >= COUNT_INTERVAL_S:
            model.served_instances, model.count_read_at = self._model_control.instances(name), now_s
        if now_s - model.memory_read_at >= MEMORY_INTERVAL_S and model.served_instances.count:
            model.instance_bytes = sum(memory_bytes(pid) for pid in processes) / model.served_instances.count
            model.memory_read_at = now_s if model.instance_bytes else float("-inf")
        cpu_wait = model.cpu.read(processes)
        if not model.served_instances.count or not load:
            return None
        return LoadSample(
            now_s,
            model.served_instances.count,
            *load,
            cpu_wait,
            available_bytes(),
            model.instance_bytes,
            gpu if model.served_instances.is_on_gpu else None,
        )

    def _carry_out(self, name: str, model: _ScaledModel, decision: Decision) -> None:
        started_at, before, refusal = time.monotonic(), model.served_instances.count, ""
        try:
            self._change(name, decision.count)
        except Refused as error:
            refusal = str(error)
        ended_at = time.monotonic()
        model.autoscaler.record_change(ended_at, is_refused=bool(refusal))
        model.blocked = ""
        model.count_read_at = model.memory_read_at = float("-inf")
        if refusal:
            self._health.count("instance_change_failures_total", model=name)
        else:
            direction = "up" if decision.count > before else "down"
            self._health.count("instance_changes_total", model=name, direction=direction)
        text = f"instances of '{name}': {before} → {decision.count} of {model.autoscaler.bounds}"
        took = (
            f"failed after {ended_at - started_at:.1f} s ({refusal})"
            if refusal
            else f"{ended_at - started_at:.1f} s"
        )
        self._log(f"{text}, {took}: {decision.reason}")

    def _log_blocked_once(self, name: str, model: _ScaledModel) -> None:
        reason = model.autoscaler.blocked
        if reason and not model.blocked:
            number = f"{model.served_instances.count} of {model.autoscaler.bounds}"
            self._log(f"instances of '{name}' stay {number}, although requests wait: {reason}")
        model.blocked = reason or model.blocked

    def _read_config(self, name: str) -> tuple[int, InstanceBounds | None]:
        """Return when a model's config changed, in nanoseconds (0 if it has none), and its bounds.

        While the config cannot be read, they are the last known ones.
        """
        folder, profile = Path(self._server_info.repository) / name, self._server_info.profile
        read_ns, bounds = self._read.get(name, (-1, None))
        changed_ns = 0
        with contextlib.suppress(OSError):
            changed_ns = config_path(folder, profile).stat().st_mtime_ns
        if changed_ns != read_ns:
            try:
                bounds = read_bounds(read_config(folder, profile))
            except (InvalidConfig, OSError) as error:
                if bounds or BOUNDS in str(error):
                    self._log(f"instances of '{name}' keep their bounds ({bounds or 'none'}): {error}")
        return changed_ns, bounds

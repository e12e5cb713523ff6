"""Decisions about the number of a model's instances, from samples; without a clock and without effects."""

from dataclasses import dataclass
from statistics import fmean

from nereid.base.config.instance_bounds import InstanceBounds
from nereid.base.processes import BackOff
from nereid.base.units import format_bytes

# An instance is added after this many samples in a row in which requests waited: about a second.
ADD_SAMPLES, WAITING = 5, 1.0
# Every change starts all instances anew, so the next one waits until the old instances have ended.
COOL_S = 2.0
REFUSED_DELAYS_S, CALM_S = (2.0, 5.0, 15.0, 60.0), 300.0
# Part of the time for which the processes of the model wait for a core. With as many busy threads as cores it
# is below 0.1; a third process on two cores waits for a third of the time.
CPU_FULL, GPU_FULL = 0.25, 0.9
# Requests and other programs need the rest of the free memory.
MEMORY_PART = 0.8
# Largest part of the time for which the instances that stay would be busy.
STAYING_BUSY = 0.5


@dataclass(frozen=True, slots=True)
class GpuSample:
    """The fullest GPU: the busy part of its time, 0 to 1, and its memory in bytes."""

    busy: float
    free_bytes: float
    used_bytes: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a model at one moment, and its work since the sample before.

    Args:
        at_s: monotonic seconds.
        instances: the present number, for each version.
        waiting: requests that wait for an instance now, of the version with the most.
        busy: mean number of instances that computed, of the busiest version.
        cpu_wait: part of the time for which a process of the model waited for a core, 0 to 1.
        free_bytes: available memory.
        instance_bytes: memory of one instance of all versions; 0 if unknown.
        gpu: the fullest GPU, for instances on a GPU.
    """

    at_s: float
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


class InstanceDecider:
    """Decides about one model: one instance more soon after requests wait, one less after a long idle time.

    `blocked` says why no instance is added although requests wait; empty otherwise.
    """

    def __init__(self, bounds: InstanceBounds) -> None:
        self.bounds = bounds
        self.blocked = ""
        self._back_off = BackOff(REFUSED_DELAYS_S, CALM_S)
        self._not_before_s = float("-inf")
        self._start_again()

    def look(self, sample: Sample) -> Decision | None:
        """Return the change that follows from a sample and those before; None for no change."""
        if sample.at_s < self._not_before_s:
            return None
        nearest = self.bounds.nearest(sample.instances)
        if nearest != sample.instances:
            return Decision(nearest, f"{sample.instances} is outside of the bounds")
        return self._more(sample) or self._fewer(sample)

    def changed(self, now_s: float, is_refused: bool = False) -> None:
        """Record the end of a change at a time of the samples' clock."""
        self._not_before_s = now_s + (self._back_off.failed(now_s) if is_refused else COOL_S)
        self._back_off.began(now_s)
        self._start_again()

    def _start_again(self) -> None:
        self._waits: list[Sample] = []
        self._quiet_since_s: float | None = None
        self._last_s = self._busy_s = 0.0
        self.blocked = ""

    def _more(self, sample: Sample) -> Decision | None:
        if sample.waiting < WAITING:
            self._waits, self.blocked = [], ""
            return None
        self._waits = [*self._waits, sample][-ADD_SAMPLES:]
        if len(self._waits) < ADD_SAMPLES or sample.instances >= self.bounds.high:
            return None
        self.blocked = _full_processor(self._waits) or _full_memory(sample, sample.instances + 1)
        if self.blocked:
            return None
        waiting = fmean(each.waiting for each in self._waits)
        seconds = sample.at_s - self._waits[0].at_s
        return Decision(sample.instances + 1, f"{waiting:.1f} requests waited for {seconds:.1f} s")

    def _fewer(self, sample: Sample) -> Decision | None:
        count, now_s = sample.instances, sample.at_s
        if sample.waiting >= WAITING or count <= self.bounds.low:
            self._quiet_since_s = None
            return None
        if self._quiet_since_s is None:
            self._quiet_since_s, self._last_s, self._busy_s = now_s, now_s, 0.0
        self._busy_s += sample.busy * (now_s - self._last_s)
        self._last_s, quiet_s = now_s, now_s - self._quiet_since_s
        if quiet_s < self.bounds.idle_s:
            return None
        self._quiet_since_s = None
        busy = self._busy_s / quiet_s
        if busy > STAYING_BUSY * (count - 1) or _full_memory(sample, count - 1):
            return None
        return Decision(count - 1, f"{busy:.1f} of {count} instances were busy for {quiet_s:.0f} s")


def _full_processor(samples: list[Sample]) -> str:
    """Return why another instance would find no free processor; empty if it would."""
    cpu_wait = fmean(each.cpu_wait for each in samples)
    if cpu_wait >= CPU_FULL:
        return f"its processes wait for a core {cpu_wait:.0%} of the time"
    gpus = [each.gpu.busy for each in samples if each.gpu]
    if gpus and fmean(gpus) >= GPU_FULL:
        return f"the GPU is busy {fmean(gpus):.0%} of the time"
    return ""


def _full_memory(sample: Sample, count: int) -> str:
    """Return why the memory does not suffice for `count` new instances next to the old ones; empty if so."""
    rows = [("memory", sample.free_bytes, sample.instance_bytes)]
    if sample.gpu:  # how much of the used memory belongs to the model is unknown: at most all
        rows.append(("memory of the GPU", sample.gpu.free_bytes, sample.gpu.used_bytes / sample.instances))
    for name, free, each in rows:
        if (needed := count * each / MEMORY_PART) > free:
            return f"expected {format_bytes(int(needed))} of free {name}, got {format_bytes(int(free))}"
    return ""

"""Readings for samples of models: counters of Triton's metrics page, waits for a core, and memory."""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid import metrics_page
from nereid.server.instances.instance_decision import GpuSample
from nereid.triton.stub_processes import PROC

PREFIXES = ("nv_inference_", "nv_gpu_")
COUNTS = ("pending_request_count", "request_success", "exec_count")
PARTS = ("input", "infer", "output")
US_PER_S, NS_PER_S = 1e6, 1e9


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts of one version: requests that wait now, requests that were answered, and their executions.

    `compute_s` has the computing time of all requests; requests of one batch count its time each.
    """

    waiting: float = 0.0
    requests: float = 0.0
    executions: float = 0.0
    compute_s: float = 0.0

    def busy(self, before: "Counters", seconds: float) -> float:
        """Return the mean number of instances that computed in the `seconds` since a reading."""
        requests, executions = self.requests - before.requests, self.executions - before.executions
        if requests <= 0 or executions <= 0 or seconds <= 0:  # the model may have been loaded again
            return 0.0
        return max(0.0, self.compute_s - before.compute_s) * min(1.0, executions / requests) / seconds


@dataclass(frozen=True, slots=True)
class Readings:
    """The counters by model and version, and the fullest GPU."""

    models: Mapping[str, Mapping[str, Counters]]
    gpu: GpuSample | None


def read_page(page: str) -> Readings:
    """Return the readings of Triton's metrics page."""
    lines = (line for line in page.splitlines() if line.startswith(PREFIXES))
    models: dict[str, dict[str, dict[str, float]]] = {}
    gpus: dict[str, dict[str, float]] = {}
    for each in metrics_page.parse("\n".join(lines)):
        if "gpu_uuid" in each.labels:
            gpus.setdefault(each.labels["gpu_uuid"], {})[each.name] = each.value
        elif "model" in each.labels:
            versions = models.setdefault(each.labels["model"], {})
            values = versions.setdefault(each.labels["version"], {})
            values[each.name] = values.get(each.name, 0.0) + each.value
    found = {
        name: {key: _counters(values) for key, values in versions.items()}
        for name, versions in models.items()
    }
    return Readings(found, _fullest(gpus))


def _counters(values: Mapping[str, float]) -> Counters:
    compute_us = sum(values.get(f"nv_inference_compute_{part}_duration_us", 0.0) for part in PARTS)
    counts = [values.get(f"nv_inference_{name}", 0.0) for name in COUNTS]
    return Counters(counts[0], counts[1], counts[2], compute_us / US_PER_S)


def _fullest(gpus: Mapping[str, Mapping[str, float]]) -> GpuSample | None:
    """Return the largest use and the least free memory of all GPUs, as if they were those of one."""
    if not gpus:
        return None
    values = [
        (
            each.get("nv_gpu_utilization", 0.0),
            each.get("nv_gpu_memory_total_bytes", 0.0) - each.get("nv_gpu_memory_used_bytes", 0.0),
            each.get("nv_gpu_memory_used_bytes", 0.0),
        )
        for each in gpus.values()
    ]
    busy, free, used = zip(*values, strict=True)
    return GpuSample(max(busy), min(free), max(used))


class CpuWait:
    """The part of the time for which the processes of a model wait for a core, between two readings.

    A kernel that does not count this, or a model without processes, has the machine's pressure instead.

    Args:
        proc: the kernel's table of processes.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._waited_s: dict[int, float] = {}
        self._pressed_s: float | None = None

    def read(self, pids: Collection[int], seconds: float) -> float:
        """Return the mean over the processes in the `seconds` since the last call, 0 to 1."""
        before, self._waited_s = self._waited_s, dict[int, float]()
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._waited_s[pid] = self._of_process(pid)
        grown = [max(0.0, self._waited_s[pid] - before[pid]) for pid in self._waited_s.keys() & before]
        pressed_s = 0.0 if self._waited_s else self._pressure_s()
        if not self._waited_s:
            grown = [pressed_s - self._pressed_s] if self._pressed_s is not None else []
            self._pressed_s = pressed_s
        return min(1.0, sum(grown) / len(grown) / seconds) if grown and seconds > 0 else 0.0

    def _of_process(self, pid: int) -> float:
        """Return the seconds that the threads of a process have waited for a core, one after the other.

        Source: Linux, Documentation/scheduler/sched-stats.rst, the second field.
        """
        tasks = (self._proc / str(pid) / "task").iterdir()
        return sum(int((each / "schedstat").read_text().split()[1]) for each in tasks) / NS_PER_S

    def _pressure_s(self) -> float:
        """Return the seconds in which some thread of the machine waited for a core; 0 if not counted.

        Source: Linux, Documentation/accounting/psi.rst.
        """
        with contextlib.suppress(OSError, ValueError):
            line = (self._proc / "pressure" / "cpu").read_text().splitlines()[0]
            return int(line.rpartition("total=")[2]) / US_PER_S
        return 0.0

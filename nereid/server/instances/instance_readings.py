"""Readings for samples of models: counters of Triton's metrics page, waits for a core, and memory."""

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from nereid.backends.triton.stub_processes import PROC
from nereid.base.metrics_page import Snapshot
from nereid.server.instances.instance_decision import GpuSample

INFERENCE = ("request_success", "exec_count", "compute_", "pending_request_count")
PREFIXES = (*(f"nv_inference_{name}" for name in INFERENCE), "nv_gpu_")
US_PER_S, NS_PER_S = 1e6, 1e9


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a model, each of the version with the most.

    Args:
        waiting: requests that wait for an instance now.
        busy: mean number of instances that computed.
    """

    waiting: float
    busy: float


def read_loads(page: Snapshot, growth: Snapshot, seconds: float) -> dict[str, Load]:
    """Return the load of each loaded model, from Triton's page and its growth in some seconds."""

    def grown(name: str) -> dict[tuple[str, ...], float]:
        return growth.sums(f"nv_inference_{name}", "model", "version")

    requests, executions = grown("request_success"), grown("exec_count")
    parts = [grown(f"compute_{part}_duration_us") for part in ("input", "infer", "output")]
    waiting = page.sums("nv_inference_pending_request_count", "model", "version")
    found: dict[str, Load] = {}
    for version, answered in requests.items():
        # Requests of one batch count the computing time of the batch each.
        batches = min(1.0, executions.get(version, 0.0) / answered) if answered else 0.0
        compute_s = sum(part.get(version, 0.0) for part in parts) / US_PER_S
        others = found.get(version[0], Load(0.0, 0.0))
        found[version[0]] = Load(
            max(others.waiting, waiting.get(version, 0.0)), max(others.busy, compute_s * batches / seconds)
        )
    return found


def read_gpu(page: Snapshot) -> GpuSample | None:
    """Return the largest use and the least free memory of all GPUs, as if they were those of one."""
    busy, total, used = (
        page.sums(f"nv_gpu_{name}", "gpu_uuid")
        for name in ("utilization", "memory_total_bytes", "memory_used_bytes")
    )
    if not busy and not total:
        return None
    free = [total[gpu] - used.get(gpu, 0.0) for gpu in total]
    return GpuSample(max(busy.values(), default=0.0), min(free, default=0.0), max(used.values(), default=0.0))


class CpuWait:
    """The part of the time for which the processes of a model wait for a core, between two readings.

    A kernel that does not count this, or a model without processes, has the machine's pressure instead.

    Args:
        proc: the kernel's table of processes.
        clock: monotonic time in seconds.
    """

    def __init__(self, proc: Path = PROC, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock, self._read_s = proc, clock, clock()
        self._waited_s: dict[int, float] = {}
        self._pressed_s: float | None = None

    def read(self, pids: Collection[int]) -> float:
        """Return the mean over the processes since the last call, 0 to 1."""
        seconds, self._read_s = self._clock() - self._read_s, self._clock()
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

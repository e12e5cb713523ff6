"""Observation of a soak's processes and their shared memory, by samples and without traffic."""

import contextlib
import ctypes
import gc
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc

from loadtest import resource_usage
from loadtest.resource_usage import Usage
from loadtest.servers import Supervised
from loadtest.soak.verdict import MIN_SAMPLES
from nereid import metrics_page
from nereid.assets import COFFEE
from nereid.client.classifier import Classifier
from nereid.server.command_line import REGION_PREFIX
from nereid.triton import stub_processes

SERVER, GATEWAY, CALLERS = "server", "gateway", "callers"
TRITON = "tritonserver"
REGIONS = Path(resource_usage.SHARED_MEMORY)
# Gauges of server and gateway that must be zero without traffic.
GAUGES = (
    "nereid_route_in_flight",
    "nv_inference_pending_request_count",
    "nereid_gateway_in_flight",
    "nereid_gateway_waiting",
)
# Counters with a sample for each model, and without any before the first repair.
REPAIRS = (
    "nereid_supervisor_repairs_total",
    "nereid_supervisor_repair_failures_total",
)
RESTARTS = "nereid_supervisor_restarts_total"
PAGE_S, POLL_S = 10.0, 0.5
# The limit on requests in flight and late closes, and the number of samples that show their end.
SETTLE_S, QUIET_SAMPLES = 20.0, 6


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample at `at_s` monotonic seconds; `usage` is by process tree, `memory` in bytes by process."""

    at_s: float
    usage: Mapping[str, Usage]
    zombies: frozenset[tuple[int, float]]
    memory: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quiet:
    """The state without traffic: the minimum of several samples, because the supervisor probes every second.

    `regions` are the processes' files in shared memory. `registered` are the regions that Triton knows after
    another caller, which removes those of callers that disconnected early.
    """

    usage: Mapping[str, Usage]
    regions: frozenset[str]
    registered: tuple[str, ...]
    gauges: Mapping[str, float]
    repairs: float


class Observer:
    """Observes the process trees of a server and of a gateway, and this process.

    Args:
        running: the server.
        gateway_pid, gateway_port: of the gateway.
    """

    def __init__(self, running: Supervised, gateway_pid: int, gateway_port: int) -> None:
        self._running = running
        self._pids = {SERVER: running.pid, GATEWAY: gateway_pid}
        self._gateway_port = gateway_port
        words = psutil.Process(running.record.pid).cmdline()
        (self._prefix,) = {word.partition(REGION_PREFIX)[2] for word in words if REGION_PREFIX in word}
        self._seen: set[str] = set()

    def sample(self) -> Sample:
        """Take one sample."""
        self._seen |= self._open_regions()
        zombies = [found for pid in self._pids.values() for found in _zombies(pid)]
        return Sample(time.monotonic(), self._usage(), frozenset(zombies), self._memory())

    def quiet(self) -> Quiet:
        """Wait until no request is in flight, or for a limited time, and take samples."""
        deadline = time.monotonic() + SETTLE_S
        samples: list[Mapping[str, Usage]] = []
        gauges = self._gauges()
        while len(samples) < QUIET_SAMPLES or (any(gauges.values()) and time.monotonic() < deadline):
            time.sleep(POLL_S)
            now = self._gauges()
            gauges = {name: min(value, gauges.get(name, value)) for name, value in now.items()}
            samples = [*samples, self.sample().usage][-QUIET_SAMPLES:]
        return Quiet(
            {tree: minimum([each[tree] for each in samples]) for tree in samples[0]},
            self.regions(),
            self._registered(),
            gauges,
            self._repairs(),
        )

    def regions(self) -> frozenset[str]:
        """Return the files in shared memory that these processes made, or had open."""
        names = resource_usage.shared_memory()
        return frozenset(name for name in names if name.startswith(self._prefix) or name in self._seen)

    def _memory(self) -> dict[str, int]:
        """Return the memory of each process: stubs have the names of their instances."""
        record = self._running.record
        names = {record.pid: TRITON}
        for stub in stub_processes.find(record.pid, self._running.repository):
            names[stub.process.pid] = stub.instance
        found: Counter[str] = Counter({CALLERS: resource_usage.own_bytes(os.getpid())})
        for tree, pid in self._pids.items():
            for process in resource_usage.tree(pid):
                with contextlib.suppress(OSError):  # a process that ended, or a zombie
                    found[names.get(process.pid, tree)] += resource_usage.own_bytes(process.pid)
        return dict(found)

    def _usage(self) -> dict[str, Usage]:
        found = {tree: resource_usage.usage(pid) for tree, pid in self._pids.items()}
        own = psutil.Process()
        # Free memory in the threads' allocators is not a leak, so it is returned before a sample.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        memory_bytes = resource_usage.own_bytes(own.pid)
        return {**found, CALLERS: Usage(1, 0, own.num_threads(), own.num_fds(), memory_bytes)}

    def _open_regions(self) -> set[str]:
        pids = [each.pid for pid in self._pids.values() for each in resource_usage.tree(pid)]
        return {name for pid in (*pids, os.getpid()) for name in _regions_of(pid)}

    def _registered(self) -> tuple[str, ...]:
        with Classifier(self._running.record.url("grpc"), shared_memory="system") as classifier:
            classifier.classify(COFFEE)
        with tritonclient.grpc.InferenceServerClient(self._running.record.url("grpc")) as client:
            return tuple(sorted(client.get_system_shared_memory_status(as_json=True).get("regions", {})))

    def _gauges(self) -> dict[str, float]:
        record = self._running.record
        samples = [
            sample
            for port in (record.ports.metrics, self._gateway_port)
            for sample in metrics_page.parse(metrics_page.fetch(f"{record.host}:{port}", PAGE_S))
        ]
        return present(samples, GAUGES)

    def _repairs(self) -> float:
        record = self._running.record
        page = metrics_page.fetch(f"{record.host}:{record.health_port}", PAGE_S)
        samples = list(metrics_page.parse(page))
        return sum(present(samples, [RESTARTS]).values()) + sum(
            each.value for each in samples if each.name in REPAIRS
        )


class Sampler:
    """Takes a sample in every `period_s` of the context; `failure` has the reason of an early end."""

    def __init__(self, sample: Callable[[], Sample], period_s: float) -> None:
        self.samples: list[Sample] = []
        self.failure = ""
        self._sample, self._period_s = sample, period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample_on, name="sampler")

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def has(self, since_s: float) -> bool:
        """Check whether there are enough samples since a time, or no more will come."""
        return bool(self.failure) or sum(each.at_s >= since_s for each in self.samples) >= MIN_SAMPLES

    def _sample_on(self) -> None:
        began_s, random = time.monotonic(), np.random.default_rng(0)
        for place in itertools.count():
            # Regular samples could be in step with regular work, and show a false growth.
            due_s = began_s + (place + random.random()) * self._period_s
            if self._over.wait(max(0.0, due_s - time.monotonic())):
                return
            try:
                self.samples.append(self._sample())
            except psutil.Error as error:
                self.failure = f"an observed process ended: {error}"
                return
            except Exception as error:  # else the soak would wait for samples permanently
                self.failure = f"sampling failed: {type(error).__name__}: {error}"
                return


def present(samples: Sequence[metrics_page.Sample], names: Sequence[str]) -> dict[str, float]:
    """Return the sum of each metric.

    Raises:
        LookupError: no page has a metric, which differs from zero.
    """
    if missing := {*names} - {each.name for each in samples}:
        raise LookupError(f"no page has {', '.join(sorted(missing))}")
    return {name: sum(each.value for each in samples if each.name == name) for name in names}


def minimum(samples: Sequence[Usage]) -> Usage:
    """Return the minimum of each number."""
    return Usage(*(min(getattr(each, number.name) for each in samples) for number in fields(Usage)))


def lasting(samples: Sequence[Sample]) -> set[int]:
    """Return the processes that were zombies in two successive samples."""
    return {pid for before, after in itertools.pairwise(samples) for pid, _ in before.zombies & after.zombies}


def _zombies(pid: int) -> Iterator[tuple[int, float]]:
    for process in resource_usage.tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                yield process.pid, process.create_time()


def _regions_of(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = Path(line.split(maxsplit=5)[-1])
            if path.parent == REGIONS:
                yield path.name
    with contextlib.suppress(OSError):
        for each in Path(f"/proc/{pid}/fd").iterdir():
            path = each.readlink()
            if path.parent == REGIONS:
                yield path.name

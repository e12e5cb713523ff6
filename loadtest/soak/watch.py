"""Looks at the processes of a soak and at what they share, every so often and once while nothing is asked."""

import contextlib
import ctypes
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import psutil
import tritonclient.grpc

from loadtest import processes
from loadtest.processes import Usage
from loadtest.servers import Supervised
from loadtest.soak.verdict import FEWEST
from nereid import metrics_page
from nereid.assets import COFFEE
from nereid.client.classifier import Classifier
from nereid.server.command_line import region_prefix

SERVER, GATEWAY, CALLERS = "server", "gateway", "callers"
REGIONS = Path(processes.SHARED_MEMORY)
# What must be zero while nobody asks, on the server's page and on the gateway's.
GAUGES = (
    "nereid_route_in_flight",
    "nv_inference_pending_request_count",
    "nereid_gateway_in_flight",
    "nereid_gateway_waiting",
)
# These have a line of their own for each model, and none before the first.
REPAIRS = (
    "nereid_supervisor_repairs_total",
    "nereid_supervisor_repair_failures_total",
)
RESTARTS = "nereid_supervisor_restarts_total"
PAGE_S, LOOK_S = 10.0, 0.5
# How long what is in flight, or closes late, may take to end; and how many looks must show it ended.
SETTLE_S, LOOKS = 20.0, 6


@dataclass(frozen=True, slots=True)
class Sample:
    """One look, `at_s` monotonic seconds; `usage` and `zombies` are by tree."""

    at_s: float
    usage: Mapping[str, Usage]
    zombies: frozenset[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Quiet:
    """What is there while nobody asks: the least of several looks, since the supervisor asks every second.

    `regions` are files in shared memory of these processes; `registered` those that Triton was told of, after
    one caller more: it takes back what one cannot that has left before the server knew of its region.
    """

    usage: Mapping[str, Usage]
    regions: frozenset[str]
    registered: tuple[str, ...]
    gauges: Mapping[str, float]
    repairs: float


class Watch:
    """Watches the trees of a server and of a gateway, and this process alone.

    Args:
        running: the server.
        gateway_pid, gateway_port: of the gateway.
    """

    def __init__(self, running: Supervised, gateway_pid: int, gateway_port: int) -> None:
        self._running = running
        self._pids = {SERVER: running.pid, GATEWAY: gateway_pid}
        self._gateway_port = gateway_port
        words = psutil.Process(running.record.pid).cmdline()
        (server_id,) = (word.removeprefix("--id=") for word in words if word.startswith("--id="))
        self._prefix = region_prefix(server_id)
        self._met: set[str] = set()

    def sample(self) -> Sample:
        """Look once."""
        self._met |= self._open_regions()
        zombies = [found for pid in self._pids.values() for found in _zombies(pid)]
        return Sample(time.monotonic(), self._usage(), frozenset(zombies))

    def quiet(self) -> Quiet:
        """Wait until nothing is in flight, or for as long as that may take, and look."""
        deadline = time.monotonic() + SETTLE_S
        looks: list[Mapping[str, Usage]] = []
        gauges = self._gauges()
        while len(looks) < LOOKS or (any(gauges.values()) and time.monotonic() < deadline):
            time.sleep(LOOK_S)
            now = self._gauges()
            gauges = {name: min(value, gauges.get(name, value)) for name, value in now.items()}
            looks = [*looks, self.sample().usage][-LOOKS:]
        return Quiet(
            {tree: least([look[tree] for look in looks]) for tree in looks[0]},
            self.regions(),
            self._registered(),
            gauges,
            self._repairs(),
        )

    def regions(self) -> frozenset[str]:
        """Return the files in shared memory that these processes have made, or had open."""
        there = processes.shared_memory()
        return frozenset(name for name in there if name.startswith(self._prefix) or name in self._met)

    def _usage(self) -> dict[str, Usage]:
        found = {tree: processes.usage(pid) for tree, pid in self._pids.items()}
        own = psutil.Process()
        # What is free already is no leak, though each thread's allocator keeps it: it goes before a look.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        memory_bytes = processes.own_bytes(own.pid)
        return {**found, CALLERS: Usage(1, 0, own.num_threads(), own.num_fds(), memory_bytes)}

    def _open_regions(self) -> set[str]:
        pids = [each.pid for pid in self._pids.values() for each in processes.tree(pid)]
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
            for sample in metrics_page.parse(metrics_page.fetch(record.host, port, PAGE_S))
        ]
        return present(samples, GAUGES)

    def _repairs(self) -> float:
        record = self._running.record
        samples = list(metrics_page.parse(metrics_page.fetch(record.host, record.health_port, PAGE_S)))
        return sum(present(samples, [RESTARTS]).values()) + sum(
            each.value for each in samples if each.name in REPAIRS
        )


class Sampler:
    """Takes a sample in every `period_s` for as long as the context lasts; `failure` says why it cannot."""

    def __init__(self, look: Callable[[], Sample], period_s: float) -> None:
        self.samples: list[Sample] = []
        self.failure = ""
        self._look, self._period_s = look, period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample_on, name="sampler")

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._over.set()
        self._thread.join()

    def has(self, since_s: float) -> bool:
        """Tell whether there are samples enough since a moment, or will be no more."""
        return bool(self.failure) or sum(each.at_s >= since_s for each in self.samples) >= FEWEST

    def _sample_on(self) -> None:
        began_s, random = time.monotonic(), np.random.default_rng(0)
        for place in itertools.count():
            # In step with what comes and goes as regularly, samples would show a growth that is none.
            due_s = began_s + (place + random.random()) * self._period_s
            if self._over.wait(max(0.0, due_s - time.monotonic())):
                return
            try:
                self.samples.append(self._look())
            except psutil.Error as error:
                self.failure = f"a process that is watched has ended: {error}"
                return
            except Exception as error:  # else the soak would wait for samples for ever
                self.failure = f"nothing more can be seen: {type(error).__name__}: {error}"
                return


def present(samples: Sequence[metrics_page.Sample], names: Sequence[str]) -> dict[str, float]:
    """Return the sum of each metric.

    Raises:
        LookupError: a page does not have it, which is not the same as zero.
    """
    if missing := {*names} - {each.name for each in samples}:
        raise LookupError(f"no page has {', '.join(sorted(missing))}")
    return {name: sum(each.value for each in samples if each.name == name) for name in names}


def least(looks: Sequence[Usage]) -> Usage:
    """Return the least of each number."""
    return Usage(*(min(getattr(look, field.name) for look in looks) for field in fields(Usage)))


def lasting(samples: Sequence[Sample]) -> set[int]:
    """Return the processes that were zombies in two samples, one after the other."""
    return {pid for before, after in itertools.pairwise(samples) for pid, _ in before.zombies & after.zombies}


def _zombies(pid: int) -> Iterator[tuple[int, float]]:
    for process in processes.tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE:
                yield process.pid, process.create_time()


def _regions_of(pid: int) -> Iterator[str]:
    """Give the files in shared memory that a process maps or has open."""
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

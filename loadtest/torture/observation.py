"""Observation of processes and shared memory: under traffic, without any, and after the end of the server."""

import contextlib
import ctypes
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from loadtest import resource_usage
from loadtest.resource_usage import MB
from loadtest.servers import Supervised
from loadtest.torture.faults import END_S, Gateway
from nereid.backends.triton import stub_memory, stub_processes
from nereid.base import prometheus_text
from nereid.base.prometheus_text import MetricSamples
from nereid.server.command_line import REGION_PREFIX

# Gauges of server and gateway that must be zero without traffic, and the supervisor's count of its restarts.
GAUGES = (
    *("nereid_route_in_flight", "nv_inference_pending_request_count"),
    *("nereid_gateway_in_flight", "nereid_gateway_waiting", "nereid_supervisor_restarts_total"),
)
# Counters of the supervisor without any sample before the first repair.
REPAIRS = ("nereid_supervisor_repairs_total", "nereid_supervisor_repair_failures_total")
PAGE_S, POLL_S = 10.0, 0.5
# The limit on requests in flight and late closes, and the number of samples that show their end.
SETTLE_S, QUIET_SAMPLES = 20.0, 6

# Numbers by name: those of memory are in MB.
Sample = dict[str, float]


class Observer:
    """Observes the process trees of a server and of a gateway, and this process."""

    def __init__(self, running: Supervised, gateway: Gateway) -> None:
        self._running, self._gateway = running, gateway
        self._prefixes, self._seen = set[str](), set[str]()
        self._processes = set[psutil.Process]()

    def note(self) -> None:
        """Remember the present processes and their shared memory."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for pid in self._pids().values():
                self._processes.update(resource_usage.tree(pid))
            words = psutil.Process(self._running.server_info.pid).cmdline()
            self._prefixes |= {word.partition(REGION_PREFIX)[2] for word in words if REGION_PREFIX in word}
        for pid in (os.getpid(), *(process.pid for process in self._processes)):
            self._seen.update(_regions_of(pid))

    def left(self) -> tuple[list[str], list[str]]:
        """Return what is left after the end of server and gateway: processes, and files in shared memory."""
        # A killed process needs a moment to end.
        _, left = psutil.wait_procs(self._processes, timeout=END_S)
        return [f"{process.pid} {process.status()}" for process in left], self._regions()

    def sample(self) -> Sample:
        """Measure each process tree, and the memory of each process."""
        self.note()
        # Free memory in the threads' allocators is not a leak, so it is returned before a sample.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        server_info, values = self._running.server_info, Counter[str]()
        names = {server_info.pid: "tritonserver"}
        for stub in stub_processes.find(server_info.pid, self._running.repository):
            names[stub.process.pid] = stub.instance
        trees = {tree: resource_usage.tree(pid) for tree, pid in self._pids().items()}
        for tree, processes in {**trees, "callers": [psutil.Process()]}.items():
            values[f"zombies, {tree}"] = 0
            for process in processes:
                with contextlib.suppress(psutil.Error, OSError):  # it ended, or is a zombie
                    values[f"processes, {tree}"] += 1
                    values[f"zombies, {tree}"] += process.status() == psutil.STATUS_ZOMBIE
                    values[f"threads, {tree}"] += process.num_threads()
                    values[f"open files, {tree}"] += process.num_fds()
                    memory_bytes = resource_usage.own_bytes(process.pid)
                    values[f"memory in all, {tree}"] += memory_bytes
                    values[f"memory, {names.get(process.pid, tree)}"] += memory_bytes
        return {name: value / MB if name.startswith("memory") else value for name, value in values.items()}

    def samples(self, seconds: float, period_s: float, least: int = 2) -> list[Sample]:
        """Take samples for some time, and until there are enough."""
        began_s, samples, draw = time.monotonic(), list[Sample](), random.Random(0)
        while time.monotonic() < began_s + seconds or len(samples) < least:
            # Regular samples could be in step with regular work, and show a false growth.
            time.sleep(period_s * (0.5 + draw.random()))
            samples.append(self.sample())
        return samples

    def quiet(self) -> Sample:
        """Wait until no request is in flight, or for a limited time; returns the minimum of each count.

        One sample may show the supervisor's own probe.
        """
        deadline = time.monotonic() + SETTLE_S
        samples = [self.sample() | self._gauges()]
        while len(samples) < QUIET_SAMPLES or (any(self._gauges().values()) and time.monotonic() < deadline):
            time.sleep(POLL_S)
            samples = [*samples, self.sample() | self._gauges()][-QUIET_SAMPLES:]
        counts = {name for name in samples[0] if not name.startswith("memory")}
        values = {name: min(sample.get(name, 0.0) for sample in samples) for name in counts}
        return values | {"shared memory regions": len(self._regions())}

    def _pids(self) -> dict[str, int]:
        return {"server": self._running.pid, "gateway": self._gateway.pid}

    def _regions(self) -> list[str]:
        names, prefixes = [file.name for file in stub_memory.FOLDER.iterdir()], (*self._prefixes,)
        return sorted(name for name in names if name in self._seen or name.startswith(prefixes))

    def _gauges(self) -> Sample:
        server_info = self._running.server_info
        ports = server_info.ports.metrics, self._gateway.port, server_info.health_port
        pages = (prometheus_text.fetch(f"127.0.0.1:{port}", PAGE_S) for port in ports)
        return gauges(MetricSamples.parse("\n".join(pages)))


def gauges(page: MetricSamples) -> Sample:
    """Return the sum of each gauge, and of the repairs.

    Raises:
        LookupError: a gauge is missing, which differs from zero.
    """
    values = {name: page.gauge(name) for name in GAUGES}
    numbers = {name: value for name, value in values.items() if value is not None}
    if missing := {*GAUGES} - {*numbers}:
        raise LookupError(f"no page has {', '.join(sorted(missing))}")
    return numbers | {"repairs": sum(map(page.total, REPAIRS))}


def _regions_of(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        paths = [Path(line.split(maxsplit=5)[-1]) for line in lines]
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                paths.append(link.readlink())
        yield from (path.name for path in paths if path.parent == stub_memory.FOLDER)

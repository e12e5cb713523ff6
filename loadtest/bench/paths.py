"""The server's paths: what runs, how each cell asks it, and what that takes of the machine."""

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from loadtest import gateway, perf_analyzer, processes, servers, wrk
from loadtest.bench import limit
from loadtest.bench.plan import PHOTOS, PRECISIONS, TENSOR, WRK, Cell
from loadtest.bench.sample import Sample
from nereid.server.command_line import PLAIN_PROFILE
from nereid.server.embedded_server import infer_path
from nereid.server.ports import Ports
from nereid.tune import photos
from nereid.tune.load_generator import Load, LoadFailed

# Each path's profile of the server.
PROFILES = {
    "cpu": "cpu",
    "route": "cpu",
    "gateway": "cpu",
    "ensemble": PLAIN_PROFILE,
    "network": PLAIN_PROFILE,
}
# After so long without an answer the queue is empty: an instance may pause for 0.5 s (docs/tuning.md).
QUIET_S = 0.6
# How much longer load flows than its rate is counted.
LEAD_S = 1.0
PATIENCE_S = 60.0
# A proxy that the environment names has no way to this machine's own ports.
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Running:
    """What serves a path: ports, and the processes whose CPU time and memory count."""

    ports: Ports
    pids: tuple[int, ...]

    def cpu_s(self) -> float:
        """Return the CPU seconds that they have taken so far."""
        return sum(map(processes.cpu_s, self.pids))

    def memory_mb(self) -> float:
        """Return their memory (PSS)."""
        return sum(map(processes.memory_bytes, self.pids)) / processes.MB

    def sample(self, model: str, load: Callable[[], Load]) -> Sample:
        """Put load on a model; returns what that gave, and what it took of the machine.

        Raises:
            LoadFailed: requests failed, or no answer came.
        """
        images, cpu_s = self.answered(model), self.cpu_s()
        seen = load()
        memory_mb = self.memory_mb()
        images = self.finished(model) - images
        if not images:
            raise LoadFailed(f"{model} answered nothing")
        cpu_ms = (self.cpu_s() - cpu_s) / images * 1e3
        return Sample(seen.rate, seen.p50_ms, seen.p90_ms, seen.p99_ms, cpu_ms, memory_mb)

    def flowing(self, model: str, post: Callable[..., Load], seconds: float) -> Load:
        """Return what `wrk` saw, but at the rate that the server counted while answers flowed.

        The generator's own rate begins when nothing has been answered yet, and leaves out what is on its
        way at the end: at 32 in flight that is 1 or 2 % of a few seconds.
        """
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(post, seconds=seconds + LEAD_S)
            time.sleep(LEAD_S / 2)
            begin_s, images = time.monotonic(), self.answered(model)
            time.sleep(seconds)
            images, took_s = self.answered(model) - images, time.monotonic() - begin_s
            return replace(loading.result(), rate=images / took_s)

    def finished(self, model: str) -> int:
        """Return how many images a model has answered so far, once none is left on its way."""
        before = -1
        while (count := self.answered(model)) != before:
            before = count
            time.sleep(QUIET_S)
        return count

    def answered(self, model: str) -> int:
        """Return how many images a model has answered so far."""
        url = f"http://127.0.0.1:{self.ports.http}/v2/models/{model}/stats"
        with DIRECTLY.open(url, timeout=PATIENCE_S) as page:
            (stats,) = json.load(page)["model_stats"]
        return int(stats["inference_stats"]["success"]["count"])


class Paths:
    """The running servers, and files of what they are asked."""

    def __init__(self, folder: Path, running: Mapping[str, Running], gateway_port: int) -> None:
        self._folder = folder
        self._running = running
        self._gateway_port = gateway_port
        for name, size in PHOTOS.items():
            self._file(name).write_bytes(jpeg := photos.jpeg(photos.SIZES_WH[size]))
            perf_analyzer.write_input(self._file(name).with_suffix(".json"), jpeg)
        self._file(TENSOR).write_bytes(limit.tensor().tobytes())

    def measure(self, cell: Cell, seconds: float, analyzer: perf_analyzer.Analyzer | None) -> Sample:
        """Ask one path as one cell says, and see what that takes.

        Raises:
            LoadFailed: requests failed, or no answer came.
        """
        load = partial(self._load, cell, seconds, analyzer)
        return self._running[cell.path].sample(model_of(cell), load)

    def _load(self, cell: Cell, seconds: float, analyzer: perf_analyzer.Analyzer | None) -> Load:
        running, file = self._running[cell.path], self._file(cell.photo)
        ports = running.ports
        if cell.generator == WRK:
            port, path, headers = self._gateway_port, gateway.PATH, {"x-variant": f"v{_version(cell)}"}
            if cell.path != "gateway":
                port, path = ports.http, infer_path(model_of(cell))
            if cell.path not in ("gateway", "route"):
                headers = {}
            post = partial(wrk.post, port, path, file, cell.concurrency, headers=headers)
            return running.flowing(model_of(cell), post, seconds)
        assert analyzer is not None, "planned without perf_analyzer"
        port = ports.grpc if cell.protocol == "grpc" else ports.http
        target = perf_analyzer.Target(cell.protocol, port, model_of(cell), file.with_suffix(".json"))
        return analyzer.ask(target, cell.concurrency, seconds)

    def _file(self, photo: str) -> Path:
        return self._folder / f"{photo}.bytes"


def model_of(cell: Cell) -> str:
    """Return the model that a cell asks, as the server's paths name it."""
    if cell.path == "network":
        return f"efficientnet_lite0/versions/{_version(cell)}"
    return "classify" if cell.path in ("route", "gateway") else f"classify_v{_version(cell)}"


def _version(cell: Cell) -> int:
    return PRECISIONS[cell.precision]


@contextlib.contextmanager
def serving(folder: Path, environment: Mapping[str, str], cells: Sequence[Cell]) -> Iterator[Paths]:
    """Run the servers that the cells need, and the gateway if it is among them."""
    wanted = {cell.path for cell in cells if cell.path in PROFILES}
    with contextlib.ExitStack() as stack:
        started = {
            profile: stack.enter_context(servers.served(folder, environment, profile))
            for profile in sorted({PROFILES[path] for path in wanted})
        }
        running = {}
        for path in wanted:
            server = started[PROFILES[path]]
            running[path] = Running(server.options.ports, (server.pid,))
        port = 0
        if "gateway" in wanted:
            ports = running["gateway"].ports
            front = stack.enter_context(servers.gateway(ports.grpc))
            port = front.port
            running["gateway"] = Running(ports, (*running["gateway"].pids, front.pid))
        yield Paths(folder, running, port)

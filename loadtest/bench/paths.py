"""The server's paths: what runs, how each cell asks it, and what that takes of the machine."""

import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest import gateway, perf_analyzer, photos, processes, servers, wrk
from loadtest.bench import limit
from loadtest.bench.plan import PHOTOS, PRECISIONS, TENSOR, WRK, Cell
from loadtest.bench.sample import Sample
from ops import embedded
from ops.cli import CommandFailed

# Each path's profile of the server.
PROFILES = {
    "cpu": "cpu",
    "route": "cpu",
    "gateway": "cpu",
    "ensemble": embedded.PLAIN_PROFILE,
    "network": embedded.PLAIN_PROFILE,
}
# An answer takes less, so after this long without one the queue is empty.
QUIET_S = 0.2
PATIENCE_S = 60.0
# A proxy that the environment names has no way to this machine's own ports.
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Running:
    """What serves a path: ports, and the processes whose CPU time and memory count."""

    ports: embedded.Ports
    pids: tuple[int, ...]

    def cpu_s(self) -> float:
        """Return the CPU seconds that they have taken so far."""
        return sum(map(processes.cpu_s, self.pids))

    def memory_mb(self) -> float:
        """Return their memory (PSS)."""
        return sum(map(processes.memory_bytes, self.pids)) / 2**20

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
            CommandFailed: no answer came, so nothing can be told of one.
        """
        running, model = self._running[cell.path], model_of(cell)
        images, cpu_s = running.answered(model), running.cpu_s()
        load = self._load(cell, seconds, analyzer)
        memory_mb = running.memory_mb()
        images = running.finished(model) - images
        if not images:
            raise CommandFailed(f"{model} answered nothing within {seconds:g} s")
        cpu_ms = (running.cpu_s() - cpu_s) / images * 1e3
        return Sample(load.rate, load.p50_ms, load.p90_ms, load.p99_ms, cpu_ms, memory_mb)

    def _load(self, cell: Cell, seconds: float, analyzer: perf_analyzer.Analyzer | None) -> wrk.Load:
        ports, file = self._running[cell.path].ports, self._file(cell.photo)
        if cell.generator == WRK:
            port, path, headers = self._gateway_port, gateway.PATH, {"x-variant": f"v{_version(cell)}"}
            if cell.path != "gateway":
                port, path = ports.http, embedded.infer_path(model_of(cell))
            if cell.path not in ("gateway", "route"):
                headers = {}
            return wrk.post(port, path, file, cell.concurrency, seconds, headers)
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

"""The server's paths: running processes, the load of each cell, and its use of CPU and memory."""

import contextlib
import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from loadtest import resource_usage, servers, wrk
from loadtest.bench import by_hand, limit
from loadtest.bench.plan import BY_HAND, PHOTOS, PRECISIONS, TENSOR, Cell
from loadtest.bench.summary import Sample
from nereid.base.contract import VARIANT_HEADER
from nereid.insight.tune import photos
from nereid.insight.tune.load_generator import LoadFailed, LoadResult
from nereid.server.command_line import ENSEMBLE_PROFILE
from nereid.server.embedded_server import infer_path
from nereid.server.ports import Ports

# The server's profile for each path.
PROFILES = {
    **dict.fromkeys(("cpu", "route", "gateway"), "cpu"),
    **dict.fromkeys(("ensemble", "network"), ENSEMBLE_PROFILE),
}
# The queue is empty after this time without a response; an instance may pause 0.5 s (docs/performance.md).
QUIET_S = 0.6
# The load lasts longer than the count of its rate by this time.
LEAD_S = 1.0
TIMEOUT_S = 60.0
PREDICT = "/predict"
# A proxy from the environment cannot reach the ports of this machine.
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Running:
    """A served path: its ports, and the processes whose CPU time and memory count."""

    ports: Ports
    pids: tuple[int, ...]

    def cpu_s(self) -> float:
        """Return the CPU seconds of the processes so far."""
        return sum(map(resource_usage.cpu_s, self.pids))

    def sample(self, model: str, load: Callable[[], LoadResult]) -> Sample:
        """Load a model; returns rate and latencies, and the use of CPU and memory.

        Raises:
            LoadFailed: requests failed, or no response came.
        """
        images, cpu_s = self.answered(model), self.cpu_s()
        seen = load()
        memory_mb = sum(map(resource_usage.memory_bytes, self.pids)) / resource_usage.MB
        images = self.finished(model) - images
        if not images:
            raise LoadFailed(f"{model} answered no request")
        cpu_ms = (self.cpu_s() - cpu_s) / images * 1e3
        return Sample(seen.rate, seen.p50_ms, seen.p90_ms, seen.p99_ms, cpu_ms, memory_mb)

    def flowing(self, model: str, post: Callable[..., LoadResult], seconds: float) -> LoadResult:
        """Return the latencies of `wrk`, with the rate that the server counts while responses flow.

        The generator's own count begins before the first response and excludes the requests in flight at
        the end. At 32 in flight that is 1 or 2 % of a few seconds.
        """
        with ThreadPoolExecutor(1) as pool:
            loading = pool.submit(post, seconds=seconds + LEAD_S)
            time.sleep(LEAD_S / 2)
            begin_s, images = time.monotonic(), self.answered(model)
            time.sleep(seconds)
            images, took_s = self.answered(model) - images, time.monotonic() - begin_s
            return replace(loading.result(), rate=images / took_s)

    def finished(self, model: str) -> int:
        """Return the number of images that a model answered so far, after its queue is empty."""
        before = -1
        while (count := self.answered(model)) != before:
            before = count
            time.sleep(QUIET_S)
        return count

    def answered(self, model: str) -> int:
        """Return the number of images that a model answered so far."""
        url = f"http://127.0.0.1:{self.ports.http}/v2/models/{model}/stats"
        with DIRECTLY.open(url, timeout=TIMEOUT_S) as page:
            (stats,) = json.load(page)["model_stats"]
        return int(stats["inference_stats"]["success"]["count"])


class Paths:
    """The running servers, and files with their requests."""

    def __init__(self, folder: Path, running: Mapping[str, Running], gateway_port: int) -> None:
        self._folder = folder
        self._running = running
        self._gateway_port = gateway_port
        for name, size in PHOTOS.items():
            self._file(name).write_bytes(photos.jpeg(photos.SIZES_WH[size]))
        self._file(TENSOR).write_bytes(limit.tensor().tobytes())

    def measure(self, cell: Cell, seconds: float) -> Sample:
        """Measure one cell.

        Raises:
            LoadFailed: requests failed, or no response came.
        """
        return self._running[cell.path].sample(model_of(cell), partial(self._load, cell, seconds))

    def _load(self, cell: Cell, seconds: float) -> LoadResult:
        running = self._running[cell.path]
        port, path, headers = self._gateway_port, PREDICT, {VARIANT_HEADER: f"v{PRECISIONS[cell.precision]}"}
        if cell.path != "gateway":
            port, path = running.ports.http, infer_path(model_of(cell))
        if cell.path not in ("gateway", "route"):
            headers = {}
        if cell.path == BY_HAND:
            path = f"{by_hand.PATH}{cell.precision}"
        post = partial(wrk.post, port, path, self._file(cell.photo), cell.concurrency, headers=headers)
        return running.flowing(model_of(cell), post, seconds)

    def _file(self, photo: str) -> Path:
        return self._folder / f"{photo}.bytes"


def model_of(cell: Cell) -> str:
    """Return the model of a cell, as in the server's URLs."""
    if cell.path == "network":
        return f"efficientnet_lite0/versions/{PRECISIONS[cell.precision]}"
    return "classify" if cell.path in ("route", "gateway") else f"classify_v{PRECISIONS[cell.precision]}"


@contextlib.contextmanager
def serving(folder: Path, environment: Mapping[str, str], cells: Sequence[Cell]) -> Iterator[Paths]:
    """Run the servers of the cells, and the gateway if a cell needs it."""
    paths = {cell.path for cell in cells if cell.path in PROFILES}
    with contextlib.ExitStack() as stack:
        started = {
            profile: stack.enter_context(servers.served(folder, environment, profile))
            for profile in sorted({PROFILES[path] for path in paths})
        }
        running = {}
        for path in paths:
            server = started[PROFILES[path]]
            running[path] = Running(server.options.ports, (server.pid,))
        port = 0
        if "gateway" in paths:
            ports = running["gateway"].ports
            pid, port = stack.enter_context(servers.gateway(ports.http))
            running["gateway"] = Running(ports, (*running["gateway"].pids, pid))
        if BY_HAND in {cell.path for cell in cells}:
            pid, by_hand_port = stack.enter_context(servers.by_hand(by_hand.__name__, environment))
            running[BY_HAND] = Running(Ports(by_hand_port, 0, 0), (pid,))
        yield Paths(folder, running, port)

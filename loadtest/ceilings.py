"""The most requests per second of each path, with a model that does nothing and a body of 1 kB.

python -m loadtest.ceilings [--rounds 5] [--seconds 4]       needs `wrk` (Debian: apt-get install wrk)
"""

import contextlib
import json
import os
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loadtest import gateway, record, resource_usage, servers, wrk
from nereid import assets
from nereid.server.embedded_server import infer_path
from nereid.tune import photos

ROUTE, NOTHING, BARE = "classify", "nothing", "bare_bls"
CONCURRENCY = 32
# A JPEG of about 1 kB.
SIZE_WH = (32, 32)
MODEL = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(len(request.inputs()[0].as_numpy())) for request in requests]

    def respond(self, images):
        scores = np.zeros((images, 1000), np.float32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("scores", scores)])
"""
# The least that a route could do: a thread per request forwards it, without weights, deadlines and metrics.
BARE_MODEL = f"""from concurrent.futures import ThreadPoolExecutor

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.pool = ThreadPoolExecutor(64)

    def execute(self, requests):
        for request in requests:
            self.pool.submit(self.forward, request)

    def forward(self, request):
        response = pb_utils.InferenceRequest(
            model_name="{NOTHING}",
            requested_output_names=["scores"],
            inputs=request.inputs(),
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0),
        ).exec()
        request.get_response_sender().send(
            pb_utils.InferenceResponse(response.output_tensors()),
            pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )
"""
CONFIG = """backend: "python"
max_batch_size: 8
input { name: "image" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "scores" data_type: TYPE_FP32 dims: [ 1000 ] }
instance_group { kind: KIND_CPU count: 1 }
"""
DIRECT, FORWARDED, ROUTED = "model", "bare BLS", "route"
GUARDED, PREDICT = "gateway, model", "gateway, `/predict`"
HEADINGS = ("path", "requests/s", "min..max", "CPU ms of Triton", "CPU ms of the gateway", "p50 ms", "p99 ms")
COLUMNS = ("rate", "server_ms", "gateway_ms", "p50_ms", "p99_ms")

Series = dict[tuple[str, str], list[float]]


def write_repository(target: Path) -> Path:
    """Write a repository: a model that does nothing, a route to it, and a bare BLS model that calls it."""
    shutil.copytree(assets.REPOSITORY / ROUTE, target / ROUTE)
    for name, code in ((NOTHING, MODEL), (BARE, BARE_MODEL)):
        version = target / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(code)
        (version.parent / "config.pbtxt").write_text(CONFIG)
    route = json.loads((assets.REPOSITORY / f"{ROUTE}.route.json").read_text())
    route["variants"] = [{"name": "v1", "model": NOTHING, "version": 1, "weight": 100}]
    (target / f"{ROUTE}.route.json").write_text(json.dumps(route))
    return target


@dataclass(frozen=True, slots=True)
class Served:
    """The processes of server and gateway, and the port and the path of each way to the model."""

    server: int
    gateway: int
    ways: dict[str, tuple[int, str]]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Run server and gateway, and wait until both are ready."""
    repository = write_repository(folder / "repository")
    with servers.served(folder, os.environ, repository=repository) as server:
        port = server.options.ports.http
        with servers.gateway(port) as front:
            ways = {
                DIRECT: (port, infer_path(NOTHING)),
                FORWARDED: (port, infer_path(BARE)),
                ROUTED: (port, infer_path(ROUTE)),
                GUARDED: (front.port, infer_path(NOTHING)),
                PREDICT: (front.port, gateway.PATH),
            }
            yield Served(server.pid, front.pid, ways)


def _measure_round(running: Served, number: int, body: Path, seconds: float, series: Series) -> None:
    for way, (port, path) in record.turns(running.ways.items(), number):
        wrk.post(port, path, body, CONCURRENCY, 1)
        pids = {"server_ms": running.server, "gateway_ms": running.gateway}
        before = {name: resource_usage.cpu_s(pid) for name, pid in pids.items()}
        load = wrk.post(port, path, body, CONCURRENCY, seconds)
        for name, pid in pids.items():
            series[way, name].append((resource_usage.cpu_s(pid) - before[name]) / load.answered * 1e3)
        for name in ("rate", "p50_ms", "p99_ms"):
            series[way, name].append(getattr(load, name))


def summarise(ways: list[str], series: Series) -> list[record.Row]:
    """Return a row per path with medians; `rates` has the smallest and the largest rate."""
    rows: list[record.Row] = []
    for way in ways:
        row: record.Row = {"path": way, "rates": [round(f(series[way, "rate"])) for f in (min, max)]}
        row |= {name: round(statistics.median(series[way, name]), 2) for name in COLUMNS}
        rows.append(row | {"rate": round(row["rate"])})
    return rows


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as a table of docs/capacity.md."""
    return record.markdown(HEADINGS, ([*_cells(row)] for row in rows))


def _cells(row: record.Row) -> Iterator[object]:
    yield row["path"]
    yield row["rate"]
    yield "..".join(map(str, row["rates"]))
    for name in COLUMNS[1:]:
        yield row[name]


def main() -> int:
    """Measure, print and record."""
    args = record.parsed(record.parser(__doc__, rounds=5, seconds=4.0), wrk.missing())
    series: Series = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch)) as running:
        body = Path(scratch) / "photo.jpg"
        body.write_bytes(photos.jpeg(SIZE_WH))
        for number in range(args.rounds):
            _measure_round(running, number, body, args.seconds, series)
        size = body.stat().st_size
        rows = summarise([*running.ways], series)
    print(markdown(rows))
    result = {"concurrency": CONCURRENCY, "rounds": args.rounds, "seconds": args.seconds, "bytes": size}
    return record.finish(args.record, result | {"rows": rows})


if __name__ == "__main__":
    record.end(main)

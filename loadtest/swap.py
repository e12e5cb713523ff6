"""The cost of publishing for present clients: versions change under load, and every response is checked.

Eight callers send requests to the route over HTTP and gRPC. Each cycle begins with a calm span. Then a
version is published with half of the traffic, rolled back, and retired. Each version has its own last bias,
so its scores differ from all others; the library computes the expected scores in this process.

    python -m loadtest.swap [--cycles 100] [--calm-s 3]
"""

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import onnx
from onnx import numpy_helper

from loadtest import record, resource_usage, servers
from loadtest.background_load import BackgroundLoad, Request
from nereid import assets
from nereid.assets import COFFEE
from nereid.client.prediction import Prediction
from nereid.config.model_config import ModelConfig
from nereid.imaging.pipeline import Pipeline
from nereid.inference.session import Session
from nereid.publish.publisher import Gates, publish, retire, rollback
from nereid.server.run_dir import ServerRecord
from nereid.serving_errors import InferenceFailed
from nereid.tune.load_generator import percentile

NETWORK, ROUTE, BIAS = "efficientnet_lite0", "classify", "network._fc.bias"
CONCURRENCY, HALF = 8, 0.5
# The candidates equal the current version in speed, but the load disturbs the comparison.
GATES = Gates(is_change_accepted=True, max_slowdown=100)
ESPRESSO, STEP = 967, 0.03
# Scores from batches of different sizes differ by less than this.
TOLERANCE = 1e-4
# Cycles until the server's memory has settled.
SETTLED = 10
CALM, PUBLISHING, WITHDRAWING = "before", "while publishing", "while rolling back and retiring"
HEADINGS = ("callers", "requests", "p50", "p99", "p99 compared")
# The limit on the growth of memory after the first cycles, as a factor.
MAX_GROWTH = 1.10
MAX_SHOWN = 10

T = TypeVar("T")
Spans = dict[str, list[tuple[float, float]]]


class References:
    """The expected best class of each photo and its probability, by version.

    Args:
        repository: its first two versions are computed immediately.
        photos: the image files that callers send; one of an espresso if there are none.
    """

    def __init__(self, repository: Path, photos: Iterable[bytes] = ()) -> None:
        self._repository = repository
        pipeline = Pipeline.from_config(ModelConfig.from_file(repository / "imagenet_preprocess", 1))
        different = dict.fromkeys(photos) or [COFFEE.read_bytes()]
        self._pixels = [pipeline.run([[photo]]).tensor.copy() for photo in different]
        self._known: dict[str, list[tuple[int, float]]] = {}
        for version in (1, 2):
            self.add(version, repository / NETWORK / str(version))

    def add(self, version: int, folder: Path) -> None:
        """Compute the responses of the network in a version folder, except those that fail."""
        config = ModelConfig.from_file(self._repository / NETWORK, version)
        document = {**config.document, "default_model_filename": str(folder.resolve() / "model.onnx")}
        session = Session.from_config(ModelConfig.from_document(document, config.folder, 1))
        self._known[str(version)] = []
        for pixels in self._pixels:
            with contextlib.suppress(InferenceFailed):
                (scores,) = session.run({"input": pixels}, ["scores"])
                best = int(scores[0].argmax())
                self._known[str(version)].append((best, float(scores[0, best])))

    def check(self, prediction: Prediction) -> str:
        """Return the fault of a response, empty for a correct one."""
        best, expected = prediction.labels[0], self._known[prediction.version]
        if any(best.index == index and abs(best.score - score) < TOLERANCE for index, score in expected):
            return ""
        return f"version {prediction.version}: expected one of {expected}, got {best}"


def write_candidate(folder: Path, number: int) -> Path:
    """Write the FP32 network with a different bias for espresso."""
    model = onnx.load(assets.REPOSITORY / NETWORK / "1" / "model.onnx")
    (bias,) = (each for each in model.graph.initializer if each.name == BIAS)
    values = numpy_helper.to_array(bias).copy()
    values[ESPRESSO] -= STEP * number
    bias.CopyFrom(numpy_helper.from_array(values, BIAS))
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(model, path)
    return path


def run_cycles(
    server: ServerRecord, folder: Path, cycles: int, calm_s: float
) -> tuple[list[Request], Spans, list[int], list[float]]:
    """Publish, roll back and retire under load; returns requests, spans, memory and publish seconds."""
    repository = Path(server.repository)
    references = References(repository)
    spans: Spans = {CALM: [], PUBLISHING: [], WITHDRAWING: []}
    memory: list[int] = []
    took: list[float] = []

    def timed(phase: str, act: Callable[[], T]) -> T:
        begin = time.monotonic()
        result = act()
        spans[phase].append((begin, time.monotonic()))
        return result

    def withdraw(version: int) -> None:
        rollback(repository, ROUTE, server)
        retire(repository, ROUTE, version, server)

    with BackgroundLoad(server, ROUTE, CONCURRENCY, check=references.check) as load:
        for number in range(1, cycles + 1):
            source = write_candidate(folder / "candidate", number)
            # Version numbers are never reused, so this is the next one.
            references.add(number + 2, source.parent)
            timed(CALM, partial(time.sleep, calm_s))
            done = timed(PUBLISHING, partial(publish, repository, ROUTE, source, server, GATES, HALF))
            took.append(done.seconds)
            time.sleep(calm_s / 3)
            timed(WITHDRAWING, partial(withdraw, done.version))
            memory.append(resource_usage.memory_bytes(server.pid))
            bad = [each.failure for each in load.requests if each.failure]
            print(
                f"cycle {number}: {done.seconds:.1f} s, {len(load.requests)} requests, {len(bad)} wrong",
                flush=True,
            )
    return load.requests, spans, memory, took


def summarise(requests: list[Request], spans: Spans) -> list[record.Row]:
    """Return a row for each phase, with the requests that began in it and their latencies."""
    rows: list[record.Row] = []
    for phase, times in spans.items():
        latencies = sorted(
            (each.end_s - each.begin_s) * 1e3
            for each in requests
            if any(begin <= each.begin_s < end for begin, end in times)
        )
        p50, p99 = (round(percentile(latencies, percent), 1) for percent in (50, 99))
        rows.append({"phase": phase, "requests": len(latencies), "p50_ms": p50, "p99_ms": p99})
    for row in rows:
        row["compared"] = round(row["p99_ms"] / rows[0]["p99_ms"], 2)
    return rows


def growth(memory: list[int]) -> float | None:
    """Return the factor by which memory grew since the server settled; None after too few cycles."""
    if len(memory) < 2 * SETTLED:
        return None
    return round(statistics.median(memory[-SETTLED:]) / statistics.median(memory[SETTLED : 2 * SETTLED]), 3)


def _cells(row: record.Row) -> list[str]:
    latencies = f"{row['p50_ms']} ms", f"{row['p99_ms']} ms", f"{row['compared']} ×"
    return [row["phase"], f"{row['requests']:,}", *latencies]


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/publishing.md."""
    return record.markdown(HEADINGS, map(_cells, rows))


def main() -> int:
    """Measure, print and record; exit status 1 if a response was wrong or memory grew."""
    args = record.parsed(record.parser(__doc__, cycles=100, calm_s=3.0))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        repository = shutil.copytree(assets.REPOSITORY, folder / "models")
        with servers.served(folder, os.environ, repository=repository) as server:
            options = server.options
            about = ServerRecord(
                server.pid, options.host, options.ports, str(repository), options.profile, ""
            )
            requests, spans, memory, took = run_cycles(about, folder, args.cycles, args.calm_s)
    rows, wrong = summarise(requests, spans), [each.failure for each in requests if each.failure]
    result = {
        "concurrency": CONCURRENCY,
        "cycles": args.cycles,
        "requests": len(requests),
        "wrong": len(wrong),
        "publish_s": round(statistics.median(took), 2),
        "memory_growth": growth(memory),
        "memory_mb": [round(each / resource_usage.MB) for each in memory],
    }
    print(markdown(rows))
    print({key: value for key, value in result.items() if key != "memory_mb"})
    missed = [f"a wrong response: {failure}" for failure in wrong[:MAX_SHOWN]]
    if (factor := growth(memory) or 0) > MAX_GROWTH:
        missed.append(f"memory grew by a factor of {factor}")
    return record.finish(args.record, result | {"rows": rows}, missed)


if __name__ == "__main__":
    record.end(main)

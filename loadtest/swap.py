"""What publishing costs those who are being served: versions come and go under load, every answer checked.

Eight callers ask the route over HTTP and gRPC. In each cycle they are left alone for a while; then a version
is published with half of the traffic, rolled back, and retired. Each version has its own last bias, so that
its answers are those of no other; they are compared with what the library computes in this process.

    python -m loadtest.swap [--cycles 100] [--calm-s 3]
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

from loadtest import processes, record, servers
from loadtest.callers import Callers, Request
from nereid import assets
from nereid.assets import COFFEE
from nereid.client.prediction import Prediction
from nereid.config.model_config import ModelConfig
from nereid.imaging.pipeline import Pipeline
from nereid.inference.session import Session
from nereid.publish.publisher import Gates, publish, retire, rollback
from nereid.server.run_dir import ServerRecord
from nereid.tune.closed_loop import percentile

NETWORK, ROUTE, BIAS = "efficientnet_lite0", "classify", "network._fc.bias"
CONCURRENCY, HALF = 8, 100
ESPRESSO, STEP = 967, 0.03
# Sums in batches of another size differ by less.
CLOSE = 1e-4
# The server has settled after so many cycles.
SETTLED = 10
CALM, PUBLISHING, LEAVING = "before", "while publishing", "while rolling back and retiring"
HEADINGS = ("callers", "requests", "p50", "p99", "p99 compared")
# How much memory may grow after the first cycles, as a factor.
GROWTH = 1.10

Spans = dict[str, list[tuple[float, float]]]


class References:
    """What each version answers on a photo: the probability of espresso, by version.

    Args:
        repository: whose first two versions are known at once.
        photo: an image file of an espresso.
    """

    def __init__(self, repository: Path, photo: bytes | None = None) -> None:
        self._repository = repository
        pipeline = Pipeline.from_config(ModelConfig.from_file(repository / "imagenet_preprocess", 1))
        self._pixels = pipeline.run([[photo or COFFEE.read_bytes()]]).tensor.copy()
        self._known: dict[str, float] = {}
        for version in (1, 2):
            self.add(version, repository / NETWORK / str(version))

    def add(self, version: int, folder: Path) -> None:
        """Compute what the network in a version folder answers."""
        config = ModelConfig.from_file(self._repository / NETWORK, version)
        document = {**config.document, "default_model_filename": str(folder.resolve() / "model.onnx")}
        session = Session.from_config(ModelConfig.from_document(document, config.folder, 1))
        (scores,) = session.run({"input": self._pixels}, ["scores"])
        self._known[str(version)] = float(scores[0, ESPRESSO])

    def check(self, prediction: Prediction) -> str:
        """Tell what is wrong with an answer, if anything."""
        best, expected = prediction.labels[0], self._known[prediction.version]
        if best.index == ESPRESSO and abs(best.score - expected) < CLOSE:
            return ""
        return f"version {prediction.version} answered {best}, expected {expected:.6f}"


def write_candidate(folder: Path, number: int) -> Path:
    """Write the FP32 network with another bias for espresso."""
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
    """Publish, roll back and retire under load; returns requests, spans, memory and seconds of publishing."""
    repository = Path(server.repository)
    references = References(repository)
    gates = Gates(is_change_accepted=True)
    spans: Spans = {CALM: [], PUBLISHING: [], LEAVING: []}
    memory: list[int] = []
    took: list[float] = []

    def during(what: str, act: Callable[[], Any]) -> Any:
        begin = time.monotonic()
        result = act()
        spans[what].append((begin, time.monotonic()))
        return result

    def leave(version: int) -> None:
        rollback(repository, ROUTE, server)
        retire(repository, ROUTE, version, server)

    with Callers(server, ROUTE, CONCURRENCY, check=references.check) as callers:
        for number in range(1, cycles + 1):
            source = write_candidate(folder / "candidate", number)
            # No number is used twice: this is the next one.
            references.add(number + 2, source.parent)
            during(CALM, partial(time.sleep, calm_s))
            done = during(PUBLISHING, partial(publish, repository, ROUTE, source, server, gates, HALF))
            took.append(done.seconds)
            time.sleep(calm_s / 3)
            during(LEAVING, partial(leave, done.version))
            memory.append(processes.memory_bytes(server.pid))
            bad = [each.failure for each in callers.requests if each.failure]
            print(
                f"cycle {number}: {done.seconds:.1f} s, {len(callers.requests)} requests, {len(bad)} wrong",
                flush=True,
            )
    return callers.requests, spans, memory, took


def summarise(requests: list[Request], spans: Spans) -> list[dict[str, Any]]:
    """Return a row for each phase: requests that began in it, and their latencies."""
    rows: list[dict[str, Any]] = []
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
    """Return by which factor memory has grown since the server settled, if there were cycles enough."""
    if len(memory) < 2 * SETTLED:
        return None
    return round(statistics.median(memory[-SETTLED:]) / statistics.median(memory[SETTLED : 2 * SETTLED]), 3)


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row as text, for the table and the page alike."""
    return [
        row["phase"],
        f"{row['requests']:,}",
        f"{row['p50_ms']} ms",
        f"{row['p99_ms']} ms",
        f"{row['compared']} ×",
    ]


def markdown(rows: list[dict[str, Any]]) -> str:
    """Render the rows as the page's table; a test compares the two."""
    return record.markdown(HEADINGS, map(cells, rows))


def main() -> int:
    """Measure, print, record; exit status 1 if an answer was wrong or memory grew."""
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
        "memory_mb": [round(each / processes.MB) for each in memory],
    }
    print(markdown(rows))
    print({key: value for key, value in result.items() if key != "memory_mb"})
    args.record.write(result | {"rows": rows})
    for failure in wrong[:10]:
        print(f"wrong: {failure}", file=sys.stderr)
    return 1 if wrong or (result["memory_growth"] or 0) > GROWTH else 0


if __name__ == "__main__":
    record.end(main)

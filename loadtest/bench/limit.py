"""The limit: the same library and photos in process, with one process per core and without a server."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from multiprocessing.pool import Pool

import numpy as np

from loadtest import resource_usage
from loadtest.bench.plan import ALONE, BATCH, BATCHES, PHOTOS, PRECISIONS, TENSOR, Cell
from loadtest.bench.summary import Sample
from nereid.base import assets
from nereid.base.config.model_config import ModelConfig
from nereid.base.processes import available_cores
from nereid.insight.tune import photos
from nereid.insight.tune.load_generator import percentile
from nereid.server.command_line import KEEP_BUFFERS
from nereid.vision.imaging.pipeline import Pipeline
from nereid.vision.inference.session import Session

# Seconds of each call, CPU seconds of all, and the process's memory in bytes.
Work = tuple[list[float], float, int]

_pipeline: Pipeline
_sessions: dict[str, Session]


@contextlib.contextmanager
def pool(environment: MutableMapping[str, str]) -> Iterator[Pool]:
    """Start a worker per core, in the environment of the server's processes.

    A worker's malloc reads it at the start; other processes inherit the unchanged one.
    """
    added = KEEP_BUFFERS.keys() - environment.keys()
    environment.update({name: KEEP_BUFFERS[name] for name in added})
    try:
        workers = multiprocessing.get_context("spawn").Pool(available_cores(), _prepare)
    finally:
        for name in added:
            del environment[name]
    with workers:
        yield workers


def tensor() -> np.ndarray:
    """Return an input of the network, float32[1, 3, 224, 224], for cells without a photo."""
    return np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)


def measure(workers: Pool, cell: Cell, seconds: float) -> Sample:
    """Classify one photo repeatedly on all workers, or on one for the latency of a single core."""
    count = 1 if cell.path == ALONE else available_cores()
    done: list[Work] = workers.map(_work, [(cell, seconds)] * count, chunksize=1)
    batch = BATCH if cell.path == BATCHES else 1
    images = batch * sum(len(times) for times, _, _ in done)
    spent_ms = sorted(spent * 1e3 for times, _, _ in done for spent in times)
    return Sample(
        rate=batch * sum(len(times) / sum(times) for times, _, _ in done),
        p50_ms=percentile(spent_ms, 50),
        p90_ms=percentile(spent_ms, 90),
        p99_ms=percentile(spent_ms, 99),
        cpu_ms=sum(cpu_s for _, cpu_s, _ in done) / images * 1e3,
        memory_mb=sum(memory for _, _, memory in done) / resource_usage.MB,
    )


def _prepare() -> None:
    global _pipeline, _sessions
    # Ctrl-C signals every process of a terminal; a pool waits permanently for a worker that ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    repository = assets.REPOSITORY
    _pipeline = Pipeline.from_config(ModelConfig.from_file(repository / "imagenet_preprocess", 1), BATCH)
    _sessions = {
        precision: Session.from_config(ModelConfig.from_file(repository / "efficientnet_lite0", version))
        for precision, version in PRECISIONS.items()
    }


def _work(task: tuple[Cell, float]) -> Work:
    cell, seconds = task
    call = _call(cell)
    call()
    spent, began_s = [], time.process_time()
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        call()
        spent.append(time.perf_counter() - begin)
    return spent, time.process_time() - began_s, resource_usage.memory_bytes(os.getpid())


def _call(cell: Cell) -> Callable[[], object]:
    session = _sessions[cell.precision]
    if cell.photo == TENSOR:
        return partial(session.run, {"input": tensor()}, ["scores"])
    request = [photos.jpeg(photos.SIZES_WH[PHOTOS[cell.photo]])]
    requests = [request] * (BATCH if cell.path == BATCHES else 1)
    return lambda: session.run({"input": _pipeline.run(requests).tensor}, ["scores"])

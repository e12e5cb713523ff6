"""Batches from JPEG to scores as the profile `gpu` runs them, alone and overlapped, without a server."""

import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.gpu_check import chain, traces
from loadtest.gpu_check.sections import Context, Findings
from nereid.assets import CHELSEA, COFFEE
from nereid.imaging.image_times import ImageTimes
from nereid.imaging.pipeline import Pipeline
from nereid.inference.session import Session
from nereid.inference.session_options import BackendSettings
from nereid.serving_errors import ServingError
from nereid.triton.overlap.lanes import Lanes, Stages
from nereid.triton.overlap.open_lanes import open_lanes, open_stream
from nereid.triton.overlap.overlap import SLOTS, Overlap
from nereid.tune import photos

ROWS, BATCH_SIZES = 32, (1, 4, 8, 16, 32)
TRACED, MIXED = 20, 60
# Batches of another size may be computed with other algorithms of cuDNN.
TOLERANCE = 0.02


class Job:
    """A batch that keeps its results."""

    def __init__(self, images: Sequence[bytes]) -> None:
        self.images, self.done = images, threading.Event()
        self.errors: Sequence[ServingError | None] = ()
        self.scores: Any = None
        self.failure: ServingError | None = None

    def prepared(self, errors: Sequence[ServingError | None], times: Sequence[ImageTimes]) -> None:
        """Take the error of each image."""
        self.errors = errors

    def answer(self, outputs: Mapping[str, np.ndarray] | ServingError, stages: Stages | None) -> None:
        """Take the scores."""
        if isinstance(outputs, ServingError):
            self.failure = outputs
        elif outputs:
            self.scores = outputs[chain.SCORES].copy()
        self.done.set()


def open_device(slots: int) -> Lanes:
    """Open preprocessing and network, with buffers for `slots` batches."""
    pipeline = Pipeline.from_config(chain.gpu_config(chain.PREPROCESS), ROWS, slots=slots)
    stream = open_stream(0)
    config, backend = chain.gpu_config(chain.NETWORK), BackendSettings(profile=chain.PROFILE)
    session = Session.from_config(config, backend, stream=stream.ptr)
    return open_lanes(pipeline.preprocessor, session, stream, chain.INPUT, [chain.SCORES])


def measure(context: Context) -> Iterator[Findings]:
    """Yield times of batches alone, rates of overlapping ones, mixed batches, and copies to the host."""
    photo = photos.jpeg(photos.SIZES_WH["1920x1080"])
    lanes = open_device(1)
    yield {"alone": {str(rows): alone(lanes, [photo] * rows) for rows in BATCH_SIZES}}
    overlap = Overlap(partial(open_device, SLOTS), lambda reason: None)
    yield {"overlapped_per_s": {str(rows): rate(overlap, [photo] * rows) for rows in BATCH_SIZES}}
    yield {"wrong_in_mixed_batches": mixed(overlap, photo)}
    yield copies(overlap, [photo] * ROWS)
    overlap.close()


def rehearse(context: Context) -> Iterator[Findings]:
    """Yield the plan: the pipeline itself needs a GPU."""
    yield {"batch_sizes": BATCH_SIZES, "slots": SLOTS}


def alone(lanes: Lanes, images: Sequence[bytes]) -> dict[str, float]:
    """Time a batch that nothing else overlaps."""

    def run() -> None:
        lanes.decode(0, images)
        lanes.compute(0, len(images))
        lanes.wait(0)

    return chain.summary(chain.timed_ms(run, 0.5))


def rate(overlap: Overlap, images: Sequence[bytes]) -> float:
    """Return images per second of overlapping batches, the median of three runs."""
    found = []
    for _ in range(3):
        jobs = [Job(images) for _ in range(max(8, 600 // len(images)))]
        begin_s = time.perf_counter()
        run_all(overlap, jobs)
        found.append(len(jobs) * len(images) / (time.perf_counter() - begin_s))
    return round(statistics.median(found), 1)


def mixed(overlap: Overlap, photo: bytes) -> int:
    """Return how many images of mixed batches have another result than alone."""
    images = [COFFEE.read_bytes(), CHELSEA.read_bytes(), photo, b"not an image"]
    expected = run_all(overlap, [Job([image]) for image in images])
    numbers = np.random.default_rng(0)
    picks = [numbers.integers(0, len(images), numbers.integers(1, ROWS + 1)) for _ in range(MIXED)]
    jobs = run_all(overlap, [Job([images[index] for index in pick]) for pick in picks])
    return sum(
        not is_same(job, row, expected[index])
        for job, pick in zip(jobs, picks, strict=True)
        for row, index in enumerate(pick)
    )


def is_same(job: Job, row: int, alone: Job) -> bool:
    """Return whether an image of a batch has the result that it has alone."""
    if alone.scores is None:
        return str(job.errors[row]) == str(alone.errors[0])
    return job.errors[row] is None and bool(np.abs(job.scores[row] - alone.scores[0]).max() <= TOLERANCE)


def copies(overlap: Overlap, images: Sequence[bytes]) -> Findings:
    """Trace batches; returns the bytes that were copied to the host in addition to the scores."""
    jobs = [Job(images) for _ in range(TRACED)]
    with tempfile.TemporaryDirectory() as folder:
        tracer, found = traces.trace(lambda: run_all(overlap, jobs), [], Path(folder))
    scores = TRACED * len(images) * 1000 * 4
    to_host = found.get(traces.TO_HOST, {"count": 0, "bytes": 0})
    return {"tracer": tracer, "copies": found, "bytes_to_host_but_scores": to_host["bytes"] - scores}


def run_all(overlap: Overlap, jobs: Sequence[Job]) -> Sequence[Job]:
    """Submit batches, and wait for their results."""
    for job in jobs:
        overlap.submit(job)
    for job in jobs:
        job.done.wait()
        if job.failure:
            raise job.failure
    return jobs

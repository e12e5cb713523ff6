"""The parts in one process: decoder, kernel, and the network bound and unbound, alone and overlapping."""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from loadtest.gpu_check import chain
from loadtest.gpu_check.chain import Job, run_all
from loadtest.gpu_check.processes import Context
from nereid.backends.triton.batch_pipeline import SLOTS, BatchPipeline
from nereid.backends.triton.device_streams import DeviceStreams
from nereid.base.assets import CHELSEA, COFFEE
from nereid.insight.tune import photos

PHOTO_WH = photos.SIZES_WH["1920x1080"]
ROWS, BATCH_SIZES, MIXED = 32, (1, 4, 8, 32), 60
TIMED_S = 0.5
# Batches of another size may be computed with other algorithms of cuDNN.
TOLERANCE = 0.02


def measure(context: Context) -> Iterator[dict[str, Any]]:
    """Yield the bound network first, as the profile `gpu` runs it; then the parts."""
    photo = photos.jpeg(PHOTO_WH)
    streams = chain.open_bound(ROWS, 1)
    alone = {str(rows): bound(streams, [photo] * rows) for rows in BATCH_SIZES}
    yield {"photo_bytes": len(photo), "bound": alone, "bound_p50_ms": alone["1"]["p50_ms"]}
    with closing(BatchPipeline(partial(chain.open_bound, ROWS, SLOTS), lambda reason: None)) as pipeline:
        rates = {str(rows): rate(pipeline, [photo] * rows) for rows in BATCH_SIZES}
        yield {"overlapped_per_s": rates, "best_overlapped_per_s": max(rates.values())}
        yield {"wrong_in_mixed_batches": mixed(pipeline, photo)}
    work = chain.Chain(ROWS)
    results = [unbound(work, [photo] * rows) for rows in BATCH_SIZES]
    limit = min(max(result[f"{step}_per_s"] for result in results) for step in ("decode", "network"))
    yield {"unbound": results, "unbound_p50_ms": results[0]["p50_ms"], "slower_step_per_s": limit}
    yield {"decoded_by_the_host": work.preprocessor.fallbacks}


def bound(streams: DeviceStreams, images: Sequence[bytes]) -> dict[str, float]:
    """Time a batch that nothing else overlaps, and its network alone."""

    def network() -> None:
        streams.compute(0, len(images))
        streams.wait(0)

    def run() -> None:
        streams.decode(0, images)
        network()

    whole = chain.summary(chain.timed_ms(run, TIMED_S))
    return {**whole, "network_ms": round(statistics.median(chain.timed_ms(network, TIMED_S)), 4)}


def unbound(work: chain.Chain, images: Sequence[bytes]) -> dict[str, Any]:
    """Time a batch: its steps apart, and all of it from bytes to scores on the host."""
    rows = len(images)
    whole = chain.timed_ms(lambda: work.run(images).get(), TIMED_S)
    steps = chain.steps_ms(work.preprocessor, images, TIMED_S)
    network_ms = statistics.median(chain.timed_ms(lambda: work.network(rows), TIMED_S))
    return {
        "rows": rows,
        **chain.summary(whole),
        **steps,
        "network_ms": round(network_ms, 4),
        "decode_per_s": round(rows / steps["decode_ms"] * 1e3, 1),
        "network_per_s": round(rows / network_ms * 1e3, 1),
        "whole_per_s": round(rows / statistics.median(whole) * 1e3, 1),
    }


def rate(pipeline: BatchPipeline, images: Sequence[bytes]) -> float:
    """Return images per second of overlapping batches, the median of three runs."""
    rates = []
    for _ in range(3):
        jobs = [Job(images) for _ in range(max(8, 600 // len(images)))]
        begin_s = time.perf_counter()
        run_all(pipeline, jobs)
        rates.append(len(jobs) * len(images) / (time.perf_counter() - begin_s))
    return round(statistics.median(rates), 1)


def mixed(pipeline: BatchPipeline, photo: bytes) -> int:
    """Return how many images of mixed batches have another result than alone."""
    images = [COFFEE.read_bytes(), CHELSEA.read_bytes(), photo, b"not an image"]
    expected = run_all(pipeline, [Job([image]) for image in images])
    numbers = np.random.default_rng(0)
    picks = [numbers.integers(0, len(images), numbers.integers(1, ROWS + 1)) for _ in range(MIXED)]
    jobs = run_all(pipeline, [Job([images[index] for index in pick]) for pick in picks])
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

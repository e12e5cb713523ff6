"""The work of the profiles for a GPU in one process: from encoded images to scores, on the first GPU.

CuPy is imported where it is used, so that a dry run can import every section.
"""

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from nereid.backends.triton.batch_pipeline import BatchPipeline
from nereid.backends.triton.device_streams import (
    DeviceStreams,
    StageTimestamps,
    open_device_streams,
    open_stream,
)
from nereid.base.assets import REPOSITORY
from nereid.base.config.model_config import ModelConfig, read_config
from nereid.base.errors import ServingError
from nereid.insight.tune.load_generator import percentile
from nereid.vision.imaging.decode import Buffers, ImageLimits, open_image
from nereid.vision.imaging.image_times import ImageTimes
from nereid.vision.imaging.pipeline import Pipeline
from nereid.vision.imaging.preprocess_settings import PreprocessSettings
from nereid.vision.imaging.transform import DATATYPES, Transform
from nereid.vision.inference.session import Session
from nereid.vision.inference.session_options import BackendSettings

PROFILE = "gpu"
PREPROCESS, NETWORK = "imagenet_preprocess", "efficientnet_lite0"
INPUT, SCORES = "input", "scores"
WARM_UP_CALLS = 5
MAX_CALLS = 200


def gpu_config(model: str) -> ModelConfig:
    """Return the config of a model's version 1 in the profile `gpu`, for an instance on the first GPU."""
    folder = REPOSITORY / model
    return ModelConfig.from_document(read_config(folder, PROFILE), folder, 1, "GPU")


def transform() -> Transform:
    """Return the preprocessing of the default model."""
    return PreprocessSettings.from_config(gpu_config(PREPROCESS)).transform


def on_host(preprocessing: Transform, encoded: bytes) -> np.ndarray:
    """Return the row that the CPU path computes from an image, decoded at full size."""
    out = np.empty(preprocessing.shape, DATATYPES[preprocessing.datatype])
    # No fraction of a JPEG's size is large enough for this margin.
    replace(preprocessing, decode_margin=inf)(open_image(encoded, ImageLimits()), out, Buffers())
    return out


class Chain:
    """Preprocessing and network as two instances of the profile `gpu_ensemble` have them: unbound."""

    def __init__(self, rows: int) -> None:
        from nereid.vision.imaging.gpu_preprocessor import GpuPreprocessor

        self.preprocessor = GpuPreprocessor(transform(), ImageLimits(), rows, device_id=0)
        self.session = Session.from_config(gpu_config(NETWORK), BackendSettings(profile=PROFILE))

    def input_rows(self, count: int) -> Any:
        """Return the first rows of the preprocessor's tensor, passed on through DLPack."""
        import cupy

        return cupy.from_dlpack(self.preprocessor.tensor[:count])

    def network(self, count: int) -> Any:
        """Run the network on the first rows; returns its scores, which stay on the GPU."""
        (scores,) = self.session.run({INPUT: self.input_rows(count)}, [SCORES], count)
        return scores

    def run(self, images: Sequence[bytes]) -> Any:
        """Compute the scores of images; they stay on the GPU."""
        errors = [error for error in self.preprocessor.prepare(images) if error]
        if errors:
            raise errors[0]
        return self.network(len(images))


class Job:
    """A batch for `BatchPipeline` that keeps its results."""

    def __init__(self, images: Sequence[bytes]) -> None:
        self.images, self.done = images, threading.Event()
        self.errors: Sequence[ServingError | None] = ()
        self.scores: Any = None
        self.failure: ServingError | None = None

    def on_prepared(self, errors: Sequence[ServingError | None], times: Sequence[ImageTimes]) -> None:
        """Take the error of each image."""
        self.errors = errors

    def answer(
        self, outputs: Mapping[str, np.ndarray] | ServingError, stages: StageTimestamps | None
    ) -> None:
        """Take the scores."""
        if isinstance(outputs, ServingError):
            self.failure = outputs
        elif outputs:
            self.scores = outputs[SCORES].copy()
        self.done.set()


def open_bound(rows: int, slots: int) -> DeviceStreams:
    """Open preprocessing and network as the profile `gpu` does: bound, with buffers for `slots` batches."""
    pipeline = Pipeline.from_config(gpu_config(PREPROCESS), rows, slots=slots)
    stream = open_stream(0)
    session = Session.from_config(gpu_config(NETWORK), BackendSettings(profile=PROFILE), stream=stream.ptr)
    return open_device_streams(pipeline.preprocessor, session, stream, INPUT, [SCORES])


def run_all(pipeline: BatchPipeline, jobs: Sequence[Job]) -> Sequence[Job]:
    """Submit batches, and wait for their results."""
    for job in jobs:
        pipeline.submit(job)
    for job in jobs:
        job.done.wait()
        if job.failure:
            raise job.failure
    return jobs


def timed_ms(call: Callable[[], Any], seconds: float) -> list[float]:
    """Time a call that waits for the GPU, repeatedly, after `WARM_UP_CALLS`; returns milliseconds."""
    for _ in range(WARM_UP_CALLS):
        call()
    spent: list[float] = []
    end_s = time.perf_counter() + seconds
    while len(spent) < MAX_CALLS and (not spent or time.perf_counter() < end_s):
        begin_s = time.perf_counter()
        call()
        spent.append((time.perf_counter() - begin_s) * 1e3)
    return spent


def summary(spent_ms: Sequence[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds, and the number of calls."""
    p50_ms, p99_ms = statistics.median(spent_ms), percentile(sorted(spent_ms), 99)
    return {"p50_ms": round(p50_ms, 3), "p99_ms": round(p99_ms, 3), "calls": len(spent_ms)}


def steps_ms(preprocessor: Any, images: Sequence[bytes], seconds: float) -> dict[str, float]:
    """Time decoder, kernel and both together for a batch: medians in milliseconds."""
    with preprocessor.on_device():

        def decode() -> Any:
            decoded = preprocessor.decode(images)
            preprocessor.stream.synchronize()
            return decoded

        def resize() -> None:
            preprocessor.resize(sources)
            preprocessor.stream.synchronize()

        kept = decode()  # the decoded pixels must stay until the kernel has read them
        sources = [image.source for image in kept]
        spent = {"decode_ms": timed_ms(decode, seconds), "kernel_ms": timed_ms(resize, seconds)}
    spent["prepare_ms"] = timed_ms(lambda: preprocessor.prepare(images), seconds)
    return {name: round(statistics.median(values), 4) for name, values in spent.items()}

"""The work of the profile `gpu` in one process: from encoded images to scores, on the first GPU.

CuPy is imported where it is used, so that a dry run can import every section.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from nereid.assets import REPOSITORY
from nereid.config.model_config import ModelConfig, read_profile
from nereid.imaging.buffers import Buffers
from nereid.imaging.decode import Limits, open_image
from nereid.imaging.preprocess_settings import PreprocessSettings
from nereid.imaging.transform import DATATYPES, Transform

PROFILE = "gpu"
# The same steps, each in a process of its own.
ENSEMBLE = "gpu_ensemble"
PREPROCESS, NETWORK = "imagenet_preprocess", "efficientnet_lite0"
INPUT, SCORES = "input", "scores"
WARM_UP_CALLS = 5
MAX_CALLS = 200


def gpu_config(model: str, version: int = 1) -> ModelConfig:
    """Return a model's config in the profile `gpu`, for an instance on the first GPU."""
    folder = REPOSITORY / model
    return ModelConfig.from_document(read_profile(folder, PROFILE), folder, version, "GPU")


def transform() -> Transform:
    """Return the preprocessing of the default model."""
    return PreprocessSettings.from_config(gpu_config(PREPROCESS)).transform


def on_host(wanted: Transform, encoded: bytes) -> np.ndarray:
    """Return the row that the CPU path computes from an image, decoded at full size."""
    out = np.empty(wanted.shape, DATATYPES[wanted.datatype])
    # No fraction of a JPEG's size is large enough for this margin.
    replace(wanted, decode_margin=inf)(open_image(encoded, Limits()), out, Buffers())
    return out


def levels(wanted: Transform, row: np.ndarray) -> np.ndarray:
    """Undo layout and normalisation: 0..255, float64[H, W, 3], in the order of the tensor's colours."""
    last = row if wanted.layout == "NHWC" else row.transpose(1, 2, 0)
    return last.astype(np.float64) * wanted.std + wanted.mean


def difference(wanted: Transform, row: np.ndarray, expected: np.ndarray) -> dict[str, float]:
    """Return mean and maximum difference of two rows, in levels of 255."""
    apart = np.abs(levels(wanted, row) - levels(wanted, expected))
    return {"mean": round(float(apart.mean()), 4), "max": round(float(apart.max()), 4)}


def build_preprocessor(rows: int, wanted: Transform | None = None) -> Any:
    """Return a preprocessor on the first GPU, for batches of at most `rows` images."""
    from nereid.imaging.gpu_preprocessor import GpuPreprocessor

    return GpuPreprocessor(wanted or transform(), Limits(), rows, device_id=0)


class Chain:
    """Preprocessing and network on the first GPU, as two instances of a server have them."""

    def __init__(self, rows: int, version: int = 1) -> None:
        from nereid.inference.session import Session
        from nereid.inference.session_options import BackendSettings

        self.preprocessor = build_preprocessor(rows)
        self.session = Session.from_config(gpu_config(NETWORK, version), BackendSettings(profile=PROFILE))

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
    ordered = sorted(spent_ms)
    last = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return {
        "p50_ms": round(statistics.median(ordered), 3),
        "p99_ms": round(last, 3),
        "calls": len(ordered),
    }


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
        sources = [each.source for each in kept]
        spent = {"decode_ms": timed_ms(decode, seconds), "kernel_ms": timed_ms(resize, seconds)}
    spent["prepare_ms"] = timed_ms(lambda: preprocessor.prepare(images), seconds)
    return {name: round(statistics.median(values), 4) for name, values in spent.items()}

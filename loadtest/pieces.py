"""Small measurements behind choices in the library, on all cores together as in a saturated server.

python -m loadtest.pieces [--rounds 15] [--record pieces]

`python -m loadtest.bench` measures the pieces of `LIBRARY` in each of its runs.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import simplejpeg

from loadtest import record
from loadtest.preprocess import normalised
from nereid.assets import REPOSITORY
from nereid.config.model_config import ModelConfig
from nereid.imaging.buffers import Buffers
from nereid.imaging.decode import EncodedImage, Limits, open_image
from nereid.imaging.preprocess_settings import PreprocessSettings
from nereid.imaging.resample import resample
from nereid.imaging.transform import Transform, make_plan
from nereid.inference.run_sizes import RUN_BATCH_SIZE
from nereid.inference.session import Session
from nereid.processes import available_cores
from nereid.tune import photos

RUN_BATCH_SIZES = (1, 2, 4, 8)
BATCH = 8
TURN_S = 0.2
GREY = np.full((256, 384, 3), 127, np.uint8)
Piece = Callable[[], object]


class Decoded(EncodedImage):
    """A decoded image, so that the time of a transform excludes the decoder."""

    def pixels(self, shrink: int, background: tuple[int, ...], buffers: Buffers) -> np.ndarray:
        """Return the pixels of a grey image, uint8[H, W, 3]."""
        return GREY


def _network_runs() -> dict[str, tuple[Piece, int]]:
    config = ModelConfig.from_file(REPOSITORY / "efficientnet_lite0", 1)
    inputs = {"input": np.random.default_rng(0).standard_normal((BATCH, 3, 224, 224), np.float32)}
    found: dict[str, tuple[Piece, int]] = {}
    for size in RUN_BATCH_SIZES:
        session = Session.from_config(config.replacing({RUN_BATCH_SIZE: str(size)}))
        name = f"FP32 network, batch of {BATCH} in runs of {size}"
        found[name] = partial(session.run, inputs, ["scores"]), BATCH
    return found


def _decodes() -> dict[str, tuple[Piece, int]]:
    width, height = 640, 427
    jpeg = photos.jpeg((width, height))
    found: dict[str, tuple[Piece, int]] = {}
    for eighths in (8, 5):
        size = {"min_height": -(-height * eighths // 8), "min_width": -(-width * eighths // 8)}
        call = partial(simplejpeg.decode_jpeg, jpeg, "RGB", **size)
        found[f"decode {width}x{height} at {eighths}/8"] = call, 1
    return found


def _buffers() -> dict[str, tuple[Piece, int]]:
    transform = _transform()
    found: dict[str, tuple[Piece, int]] = {}
    for size in photos.SIZES_WH.values():
        image = open_image(photos.jpeg(size), Limits())
        row, buffers = np.empty(transform.shape, np.float32), Buffers()
        name = f"photo {size[0]}x{size[1]} to tensor"
        found[f"{name}, buffers kept"] = partial(transform, image, row, buffers), 1
        found[f"{name}, buffers new for every image"] = partial(_transform_anew, transform, image), 1
    return found


def _transform_anew(transform: Transform, image: EncodedImage) -> None:
    transform(image, np.empty(transform.shape, np.float32), Buffers())


def _normalisations() -> dict[str, tuple[Piece, int]]:
    transform, buffers = _transform(), Buffers()
    height, width, _ = GREY.shape
    image = Decoded(b"", (width, height), 1)
    row = np.empty(transform.shape, np.float32)
    plan = make_plan(transform, image.size_wh, 1, 1)

    def in_two_passes() -> np.ndarray:
        planes = [plane.astype(np.uint8) for plane in resample(GREY, plan.rows, plan.columns, buffers)]
        return normalised(np.stack(planes, axis=-1))

    return {
        "decoded pixels to tensor, normalised plane by plane": (partial(transform, image, row, buffers), 1),
        "decoded pixels to tensor, normalised by NumPy's formula": (in_two_passes, 1),
    }


def _transform() -> Transform:
    config = ModelConfig.from_file(REPOSITORY / "imagenet_preprocess", 1)
    return PreprocessSettings.from_config(config).transform


def measure(rounds: int) -> dict[str, float]:
    """Time all pieces in turn in each round; returns the median milliseconds per image."""
    spent: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, (call, images) in PIECES.items():
            call()
            begin, calls = time.perf_counter(), 0
            while (elapsed := time.perf_counter() - begin) < TURN_S:
                call()
                calls += 1
            spent.setdefault(name, []).append(elapsed / calls / images * 1e3)
    return {name: statistics.median(times) for name, times in spent.items()}


def on_every_core(groups: Sequence[str], rounds: int) -> dict[str, float]:
    """Return the milliseconds per image of the pieces of some groups, as means over the cores."""
    cores = available_cores()
    with multiprocessing.get_context("spawn").Pool(cores, _prepare, [groups]) as pool:
        per_core = pool.map(measure, [rounds] * cores, chunksize=1)
    return {name: round(statistics.mean(core[name] for core in per_core), 3) for name in per_core[0]}


def _prepare(groups: Sequence[str]) -> None:
    for group in groups:
        PIECES.update(GROUPS[group]())


# The function to time, and the images that one call handles, by name.
PIECES: dict[str, tuple[Piece, int]] = {}
GROUPS = {
    "network": _network_runs,
    "decoder": _decodes,
    "buffers": _buffers,
    "normalisation": _normalisations,
}
THEIRS, LIBRARY = ("network", "decoder"), ("buffers", "normalisation")


def main() -> int:
    """Measure on every core, print and record the mean over cores."""
    args = record.parsed(record.parser(__doc__, rounds=15))
    result = on_every_core(THEIRS, args.rounds)
    record.show(("piece", "ms per image"), result.items())
    return record.finish(args.record, {"ms_per_image": result})


if __name__ == "__main__":
    record.end(main)

"""The time that one core needs for a network's input, compared with the decoder alone and with Pillow.

Each piece is measured with glibc's thresholds for malloc, and with those of our server.

python -m loadtest.preprocess [--rounds 40] [--record preprocess]
"""

import io
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import simplejpeg
from PIL import Image

from loadtest import record
from nereid import assets
from nereid.config.model_config import ModelConfig
from nereid.imaging.buffers import Buffers
from nereid.imaging.decode import Limits, open_image
from nereid.imaging.preprocess_settings import PreprocessSettings
from nereid.imaging.preprocessor import CpuPreprocessor
from nereid.imaging.resample import resample
from nereid.imaging.transform import Transform, make_plan
from nereid.server.command_line import KEEP_BUFFERS
from nereid.tune import photos

CALLS = 5
HEADINGS = ("malloc thresholds", "photo", "piece", "ms", "of the decoder alone")
PLAIN, SERVER = "glibc's", "our server's"
MEAN, STD = np.float32(127), np.float32(128)
Call = Callable[[], object]
markdown = partial(record.markdown, HEADINGS)


def calls(jpeg: bytes) -> dict[str, Call]:
    """Return the pieces to time, by name; the first one is the base of the ratios."""
    config = ModelConfig.from_file(assets.REPOSITORY / "imagenet_preprocess", 1)
    settings = PreprocessSettings.from_config(config)
    transform, limits = settings.transform, settings.limits
    ours = CpuPreprocessor(transform, limits, 1)
    image = open_image(jpeg, limits)
    plan = make_plan(transform, image.size_wh, image.orientation, image.max_shrink)
    buffers = Buffers()
    pixels = image.pixels(plan.shrink, transform.background_color, buffers).copy()
    height, width, _ = pixels.shape
    memory = np.empty(pixels.size, np.uint8)

    def first_of_its_size() -> None:
        make_plan.cache_clear()
        ours.prepare([jpeg])

    return {
        "scaled decode alone": lambda: simplejpeg.decode_jpeg(
            jpeg, "RGB", min_height=height, min_width=width, buffer=memory
        ),
        "preprocess": lambda: ours.prepare([jpeg]),
        "preprocess, first image of its size": first_of_its_size,
        "Pillow and NumPy": lambda: tutorial(jpeg, transform),
        "scaled decode, Pillow and NumPy": lambda: scaled_tutorial(jpeg, transform),
        "part: header": lambda: open_image(jpeg, limits),
        "part: weights of a new size": lambda: make_plan.__wrapped__(transform, image.size_wh, 1, 8),
        "part: resample": lambda: [None for _ in resample(pixels, plan.rows, plan.columns, buffers)],
    }


def tutorial(jpeg: bytes, transform: Transform) -> np.ndarray:
    """Preprocess as in tutorials: Pillow decodes and resizes the whole image, NumPy normalises."""
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    scale = transform.resize_shorter_px / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - transform.width_px) // 2, (image.height - transform.height_px) // 2
    image = image.crop((left, top, left + transform.width_px, top + transform.height_px))
    return normalised(np.asarray(image))


def scaled_tutorial(jpeg: bytes, transform: Transform) -> np.ndarray:
    """Preprocess with the fastest use of Pillow: a scaled decode, and a resize of the crop alone."""
    image = open_image(jpeg, Limits())
    plan = make_plan(transform, image.size_wh, 1, image.max_shrink)
    pixels = Image.fromarray(image.pixels(plan.shrink, transform.background_color, Buffers()))
    rows, columns = (placement.span for placement in transform.place(image.size_wh))
    (left, right), (top, bottom) = (
        (span.scale / plan.shrink * span.offset, span.scale / plan.shrink * (span.offset + span.count))
        for span in (columns, rows)
    )
    size = transform.width_px, transform.height_px
    return normalised(np.asarray(pixels.resize(size, Image.Resampling.BILINEAR, (left, top, right, bottom))))


def normalised(pixels: np.ndarray) -> np.ndarray:
    """Return float32[1, 3, H, W]."""
    return np.ascontiguousarray(((pixels.astype(np.float32) - MEAN) / STD).transpose(2, 0, 1)[None])


def measure(pieces: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Time the pieces in turn in each round; returns milliseconds per call, one number per round."""
    spent: dict[str, list[float]] = {name: [] for name in pieces}
    for _ in range(rounds):
        for name, call in pieces.items():
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            spent[name].append((time.perf_counter() - begin) / CALLS * 1e3)
    return spent


def judge(environment: str, rounds: int) -> list[tuple[str, ...]]:
    """Return a row per photo and piece: medians, and the median of the rounds' ratios."""
    rows: list[tuple[str, ...]] = []
    for name, size_wh in photos.SIZES_WH.items():
        jpeg = photos.jpeg(size_wh)
        spent = measure(calls(jpeg), rounds)
        alone = next(iter(spent.values()))
        for piece, times in spent.items():
            numbers = f"{statistics.median(times):.2f}", f"{record.median_ratio(times, alone):.2f}"
            rows.append((environment, f"{name}, {len(jpeg) / 1e3:.0f} kB", piece, *numbers))
    return rows


def _take_one_core() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def main() -> int:
    """Measure on one core, print and record."""
    args = record.parsed(record.parser(__doc__, rounds=40))
    rows = []
    for name, environment in {PLAIN: {}, SERVER: KEEP_BUFFERS}.items():
        os.environ |= environment
        with multiprocessing.get_context("spawn").Pool(1, _take_one_core) as pool:
            rows += pool.apply(judge, [name, args.rounds])
    record.show(HEADINGS, rows)
    return record.finish(args.record, {"rows": rows})


if __name__ == "__main__":
    record.end(main)

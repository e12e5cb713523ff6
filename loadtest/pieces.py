"""The small measurements behind choices in the library, on all cores at once, as in a saturated server.

python -m loadtest.pieces [--rounds 15] [--record pieces]
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import simplejpeg
from rich.console import Console
from rich.table import Table

from loadtest import photos, record
from ops.embedded import REPOSITORY
from python_backend.model_config import ModelConfig
from python_backend.session import Session
from python_backend.session_options import RUN_BATCH_SIZE

RUN_BATCH_SIZES = (1, 2, 4, 8)
BATCH = 8
TURN_S = 0.2
Piece = Callable[[], object]


def pieces() -> dict[str, tuple[Piece, int]]:
    """Return, by name, what to time and how many images one call handles."""
    return _network_runs() | _decodes()


def _network_runs() -> dict[str, tuple[Piece, int]]:
    config = ModelConfig.from_file(REPOSITORY / "efficientnet_lite0", 1)
    inputs = {"input": np.random.default_rng(0).standard_normal((BATCH, 3, 224, 224), np.float32)}
    found: dict[str, tuple[Piece, int]] = {}
    for size in RUN_BATCH_SIZES:
        session = Session.from_config(
            replace(config, parameters={**config.parameters, RUN_BATCH_SIZE: str(size)})
        )
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


def measure(rounds: int) -> dict[str, float]:
    """Time every piece in turn, round after round; returns the median milliseconds per image."""
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


def _prepare() -> None:
    global PIECES
    PIECES = pieces()


PIECES: dict[str, tuple[Piece, int]] = {}


def main() -> None:
    """Measure on every core, print the mean over cores, record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record", default="", help="store the result as loadtest/results/NAME.json")
    args = parser.parse_args()
    if args.record and not record.is_committed():
        parser.error(record.UNCOMMITTED)
    cores = os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(cores, _prepare) as pool:
        per_core = pool.map(measure, [args.rounds] * cores, chunksize=1)
    result = {name: round(statistics.mean(core[name] for core in per_core), 3) for name in per_core[0]}
    table = Table("piece", "ms per image")
    for name, value in result.items():
        table.add_row(name, str(value))
    Console(width=110).print(table)
    if args.record:
        record.write(args.record, {"ms_per_image": result})


if __name__ == "__main__":
    main()

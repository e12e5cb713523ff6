"""The speed of reading text next to `rapidocr`, in one process with the same threads and images.

python -m loadtest.reading_speed [--rounds 5] [--images 8] [--record reading_speed]

Both run the same networks. Each round measures one after the other, and every second round backwards.
"""

import logging
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import cv2
from rapidocr import RapidOCR

from loadtest import record
from nereid.base.assets import PARCEL_LABEL
from nereid.base.processes import available_cores
from nereid.insight.tune.load_generator import percentile
from tests.readers import networks, reader
from tests.waybills.generator import SETS, waybill

# Least and most of ratios to RapidOCR, and of what barcodes take of a label's time; most cannot be read.
LIMITS = {"throughput": (1.3, math.inf), "p50_alone": (0.0, 1.1), "barcodes": (0.0, 0.15)}
THREADS = (1, 2)
# Images of one call, as the server's batches have them.
BATCH = 4
# Those of RapidOCR have other names.
FINDING = ("decode", "detect", "boxes", "crops", "detect, boxes")
COLUMNS: record.Columns = {
    "threads": "{threads}",
    "reader": "{reader}",
    "p50 alone": "{p50_ms:.0f} ms",
    "p99 alone": "{p99_ms:.0f} ms",
    "CPU time": "{cpu_ms:.0f} ms",
    "finding lines": lambda row: f"{sum(row['stages_ms'].get(stage, 0) for stage in FINDING):.0f} ms",
    "barcodes": lambda row: f"{ms:.0f} ms" if (ms := row["stages_ms"].get("barcodes")) else "–",
    "directions": "{stages_ms[direction]:.0f} ms",
    "recognition": "{stages_ms[recognise]:.0f} ms",
    "images/s at saturation": "{images_per_s[median]:.2f}",
}
OURS, THEIRS = "nereid", "rapidocr"
Read = Callable[[Sequence[bytes]], None]


@dataclass
class Measured:
    """The measurements of one reader: ms and CPU ms of single images, images per second, and ms by stage."""

    alone_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    stages: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


class Ours:
    """Our reader."""

    def __init__(self, threads: int) -> None:
        self._reader = reader(other=networks(threads), reads_barcodes=True)

    def __call__(self, images: Sequence[bytes]) -> None:
        """Read a batch."""
        outcomes = self._reader.read(images)
        assert all(isinstance(outcome, list) for outcome in outcomes), outcomes

    def stages(self) -> dict[str, float]:
        """Return the milliseconds of the stages of the last image."""
        return self._reader.files[-1].times.milliseconds()


class Theirs:
    """RapidOCR with its default settings."""

    def __init__(self, threads: int) -> None:
        self._engine = RapidOCR(params={"EngineConfig.onnxruntime.intra_op_num_threads": threads})
        self._result: Any = None

    def __call__(self, images: Sequence[bytes]) -> None:
        """Read images one by one: it has no batches of images."""
        for image in images:
            self._result = self._engine(image)

    def stages(self) -> dict[str, float]:
        """Return the milliseconds of the stages of the last image."""
        names = ("detect, boxes", "direction", "recognise")
        return {name: 1e3 * seconds for name, seconds in zip(names, self._result.elapse_list, strict=True)}


def measure_alone(reader: Ours | Theirs, image: bytes, found: Measured) -> None:
    """Read one image, with nothing else to do."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    reader([image])
    found.cpu_ms.append((time.process_time() - began_cpu_s) * 1e3)
    found.alone_ms.append((time.perf_counter() - began_s) * 1e3)
    for name, milliseconds in reader.stages().items():
        found.stages[name].append(milliseconds)


def measure_rate(readers: Sequence[Read], images: Sequence[bytes], size: int) -> float:
    """Return images per second while every worker always has images; each reads all of them."""
    batches = [images[start : start + size] for start in range(0, len(images), size)]

    def work(reader: Read) -> None:
        for batch in batches:
            reader(batch)

    with ThreadPoolExecutor(len(readers)) as pool:
        began_s = time.perf_counter()
        for done in [pool.submit(work, reader) for reader in readers]:
            done.result()
        return len(readers) * len(images) / (time.perf_counter() - began_s)


def measure(threads: int, rounds: int, images: Sequence[bytes]) -> dict[str, Measured]:
    """Measure both readers with this many threads for each network."""
    cv2.setNumThreads(threads)
    workers = max(1, available_cores() // threads)
    readers: dict[str, list[Ours] | list[Theirs]] = {
        OURS: [Ours(threads) for _ in range(workers)],
        THEIRS: [Theirs(threads) for _ in range(workers)],
    }
    results = {name: Measured() for name in readers}
    for engines in readers.values():  # the first run of a session is slower
        for engine in engines:
            engine(images[:1])
    for number in range(rounds):
        for image in images:
            for name in record.turns(readers, number):
                measure_alone(readers[name][0], image, results[name])
        for name in record.turns(readers, number):
            size = BATCH if name == OURS else 1
            results[name].rates.append(measure_rate(readers[name], images, size))
    return results


def row(threads: int, name: str, found: Measured) -> record.Row:
    """Return the measurements of one reader as a row."""
    return {
        "threads": threads,
        "reader": name,
        "p50_ms": round(statistics.median(found.alone_ms), 1),
        "p99_ms": round(percentile(sorted(found.alone_ms), 99), 1),
        "cpu_ms": round(statistics.mean(found.cpu_ms), 1),
        "images_per_s": record.spread(found.rates),
        "stages_ms": {stage: round(statistics.median(times), 1) for stage, times in found.stages.items()},
    }


def main() -> int:
    """Measure, print and record; exit status 1 if a target is missed."""
    args = record.parsed(record.parser(__doc__, rounds=5, images=8))
    logging.disable(logging.WARNING)
    drawn = (waybill(seed).encoded for seed in SETS["development"][: args.images - 1])
    images = [PARCEL_LABEL.read_bytes(), *drawn]
    rows, ratios, missed = [], [], []
    for threads in THREADS:
        results = measure(threads, args.rounds, images)
        rows += [row(threads, name, result) for name, result in results.items()]
        ours, theirs = results[OURS], results[THEIRS]
        got = {
            "throughput": record.median_ratio(ours.rates, theirs.rates),
            "p50_alone": record.median_ratio(ours.alone_ms, theirs.alone_ms),
            "images_per_cpu_s": round(sum(theirs.cpu_ms) / sum(ours.cpu_ms), 3),
            "barcodes": record.median_ratio(ours.stages["barcodes"], ours.alone_ms),
        }
        ratios.append({"threads": threads, **got})
        for name, (least, most) in LIMITS.items():
            if not least <= got[name] <= most:
                missed.append(f"{threads} thread(s): {name} {got[name]}, wanted {least} to {most}")
    print(record.table(COLUMNS, rows), ratios, *(entry["stages_ms"] for entry in rows), sep="\n")
    about = {"images": len(images), "batch": BATCH, "rows": rows, "ratios": ratios}
    return record.finish(args.record, about, missed)


if __name__ == "__main__":
    record.end(main)

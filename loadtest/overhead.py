"""What serving costs: the served models under saturating load against the same work in process.

One run interleaves, in every round, the in-process limit (one process per core, one thread each: the same
library, no server), the ensemble and the fused profile, so that a noisy machine hits all alike. The limit
classifies one image at a time, as requests bring them, and the targets are held to it. The stricter limit of
batches of eight, the largest that Triton forms, is measured and shown beside it.

    python -m loadtest.overhead [--rounds 5] [--seconds 5]       needs `wrk` (Debian: apt-get install wrk)
"""

import argparse
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from loadtest import photos, record, wrk
from ops import embedded
from python_backend.model_config import ModelConfig
from python_backend.pipeline import Pipeline
from python_backend.session import Session

PROFILES = ("ensemble", "cpu")
CONCURRENCY = 32
BATCH = 8
SINGLES, BATCHES = "in process", f"in process, batches of {BATCH}"
HEADINGS = ("photo", "path", "unit", "median", "of singles", "of batches")
# The saturating ratios asked for, and p50 at concurrency 1 against the in-process time.
TARGETS = {"ensemble": 0.86, "cpu": 0.94}
TARGET_P50 = 1.35

_worker: tuple[Pipeline, Session]


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: images per second at saturation, or milliseconds at concurrency 1."""

    photo: str
    path: str
    unit: str
    value: float


def _prepare(network_version: int) -> None:
    global _worker
    repository = embedded.REPOSITORY
    preprocess = ModelConfig.from_file(repository / "imagenet_preprocess", 1)
    network = ModelConfig.from_file(repository / "efficientnet_lite0", network_version)
    _worker = Pipeline.from_config(preprocess, BATCH), Session.from_config(network)


def _classify_for(task: tuple[bytes, int, float]) -> list[float]:
    """Classify batches of one photo for so many seconds; returns the seconds that each batch took."""
    jpeg, batch, seconds = task
    pipeline, session = _worker
    spent, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        session.run({"input": pipeline.run([[jpeg]] * batch).tensor}, ["scores"])
        spent.append(time.perf_counter() - begin)
    return spent


def _measure_round(
    pool: Pool, ports: dict[str, int], folder: Path, model: str, seconds: float
) -> Iterator[Sample]:
    for name, size_wh in photos.SIZES_WH.items():
        path = folder / f"{name}.jpg"
        path.write_bytes(jpeg := photos.jpeg(size_wh))
        workers = os.cpu_count() or 1
        for label, batch in ((SINGLES, 1), (BATCHES, BATCH)):
            spent = pool.map(_classify_for, [(jpeg, batch, seconds)] * workers, chunksize=1)
            rate = sum(len(times) / sum(times) for times in spent) * batch
            yield Sample(name, label, "images/s", rate)
        alone = pool.map(_classify_for, [(jpeg, 1, seconds / 2)], chunksize=1)
        yield Sample(name, SINGLES, "ms", statistics.median(alone[0]) * 1e3)
        for profile, port in ports.items():
            ask = partial(wrk.post, port, embedded.infer_path(model), path)
            yield Sample(name, profile, "images/s", ask(CONCURRENCY, seconds).rate)
            yield Sample(name, profile, "ms", ask(1, seconds / 2).p50_ms)


@contextlib.contextmanager
def _servers(folder: Path) -> Iterator[dict[str, int]]:
    with contextlib.ExitStack() as stack:
        ports = {}
        for profile in PROFILES:
            options = embedded.ServerOptions(profile=profile, ports=embedded.Ports(*embedded.free_ports(3)))
            (run_dir := folder / profile).mkdir()
            stack.enter_context(embedded.EmbeddedServer(options, run_dir, os.environ))
            ports[profile] = options.ports.http
        yield ports


def summarise(samples: list[Sample]) -> list[dict[str, Any]]:
    """Return, per photo, unit and path: median, spread, and the median ratio to either limit."""
    series: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for sample in samples:
        series[sample.photo, sample.unit, sample.path].append(sample.value)
    return [
        {
            "photo": photo,
            "path": path,
            "unit": unit,
            "median": round(statistics.median(values), 2),
            "min": round(min(values), 2),
            "max": round(max(values), 2),
            "of_singles": _ratio(values, series[photo, unit, SINGLES]),
            "of_batches": _ratio(values, series.get((photo, unit, BATCHES), [])),
        }
        for (photo, unit, path), values in series.items()
    ]


def _ratio(values: list[float], limits: list[float]) -> float | None:
    """Return the median ratio over rounds: within a round, a slow phase of the machine hits both alike."""
    if not limits:
        return None
    return round(statistics.median(value / limit for value, limit in zip(values, limits, strict=True)), 3)


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """Name the rows that miss their target."""
    return [
        f"{row['path']} {row['photo']}: {row['of_singles']} in {row['unit']}"
        for row in rows
        if row["path"] in TARGETS
        and (
            row["of_singles"] < TARGETS[row["path"]]
            if row["unit"] == "images/s"
            else row["of_singles"] > TARGET_P50
        )
    ]


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row as text, for the table and the README alike."""
    names = ("photo", "path", "unit", "median", "of_singles", "of_batches")
    return ["" if row[name] is None else str(row[name]) for name in names]


def markdown(rows: list[dict[str, Any]]) -> str:
    """Render the rows as the README's table; a test compares the two."""
    return record.markdown(HEADINGS, map(cells, rows))


def main() -> int:
    """Measure, print, record; exit status 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--network-version", type=int, default=1, choices=(1, 2), help="1 FP32, 2 INT8")
    parser.add_argument("--record", default="", help="store the result as loadtest/results/NAME.json")
    args = parser.parse_args()
    if not wrk.is_installed():
        parser.error(wrk.MISSING)
    if args.record and not record.is_committed():
        parser.error(record.UNCOMMITTED)
    # The limit is what the same environment gives without a server.
    os.environ |= embedded.KEEP_BUFFERS
    samples: list[Sample] = []
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as scratch,
        _servers(Path(scratch)) as ports,
        spawn.Pool(os.cpu_count(), _prepare, (args.network_version,)) as pool,
    ):
        for _ in range(args.rounds):
            model = f"classify_v{args.network_version}"
            samples += _measure_round(pool, ports, Path(scratch), model, args.seconds)
    rows = summarise(samples)
    record.show(HEADINGS, zip(map(cells, rows), rows, strict=True))
    if args.record:
        record.write(args.record, {"concurrency": CONCURRENCY, "rounds": args.rounds, "rows": rows})
    for miss in missed(rows):
        print(f"target missed: {miss}", file=sys.stderr)
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())

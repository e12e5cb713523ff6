"""What the REST gateway costs, and how it holds under twice the load that it can carry.

In every round Triton and the gateway in front of it are asked the same by the same generator, at the same
concurrency, on the same cores. Then requests come at times of their own (open loop, Poisson), at rates around
what the gateway carried, and at twice that.

    python -m loadtest.gateway [--rounds 5] [--seconds 5]       needs `wrk` (Debian: apt-get install wrk)
"""

import contextlib
import os
import resource
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from loadtest import open_loop, processes, record, servers, wrk
from nereid.server.embedded_server import infer_path
from nereid.tune import connection, photos
from nereid.tune.load_generator import percentile

PATH = "/predict"
CONCURRENCY = 32
TO_VARIANT = {"x-variant": "v1"}
DIRECT, GATEWAY = "Triton", "gateway"
HEADINGS = ("photo", "path", "unit", "median", "of Triton's")
LOADS = (0.8, 1.0, 1.2, 2.0)
LOAD_HEADINGS = ("offered", "of the rate carried", "answered/s", "refused/s", "lost", "p50 ms", "p99 ms")
# The shares asked for: of Triton's throughput, of its p99, and of the best goodput at twice the load.
LEAST_RATE, MOST_P99, LEAST_GOODPUT = 0.85, 1.5, 0.9

Series = dict[tuple[str, str, str], list[float]]


@dataclass(frozen=True, slots=True)
class Served:
    """A running server and the gateway before it; `pid` is the gateway's."""

    triton: int
    gateway: int
    pid: int


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Run both, until ready."""
    with servers.served(folder, os.environ) as server:
        ports = server.options.ports
        with servers.gateway(ports.grpc) as gateway:
            yield Served(ports.http, gateway.port, gateway.pid)


def _measure_round(running: Served, folder: Path, seconds: float, series: Series) -> None:
    for name, size_wh in photos.SIZES_WH.items():
        photo = folder / f"{name}.jpg"
        photo.write_bytes(photos.jpeg(size_wh))
        direct = partial(wrk.post, running.triton, infer_path("classify"), photo)
        through = partial(wrk.post, running.gateway, PATH, photo)
        for path, ask in ((DIRECT, direct), (GATEWAY, through)):
            ask(1, 1.0, TO_VARIANT)  # behind nothing that the run before has left in the queues
            began_s = processes.cpu_s(running.pid)
            load = ask(CONCURRENCY, seconds, TO_VARIANT)
            series[name, path, "images/s"].append(load.rate)
            series[name, path, "ms (p99)"].append(load.p99_ms)
            if path == GATEWAY:
                spent_ms = (processes.cpu_s(running.pid) - began_s) * 1e3
                series[name, path, "ms of CPU"].append(spent_ms / load.answered)


def summarise(series: Series) -> list[dict[str, Any]]:
    """Return a row per photo, path and unit: the median, and the median of the rounds' ratios to Triton's."""
    rows = []
    for (photo, path, unit), values in series.items():
        base = series.get((photo, DIRECT, unit), [])
        ratios = [value / other for value, other in zip(values, base, strict=False)]
        rows.append(
            {
                "photo": photo,
                "path": path,
                "unit": unit,
                "median": round(statistics.median(values), 2),
                "min": round(min(values), 2),
                "max": round(max(values), 2),
                "of_direct": round(statistics.median(ratios), 3) if ratios else None,
            }
        )
    return rows


def _overload(running: Served, photo: bytes, carried: float, seconds: float) -> list[dict[str, Any]]:
    """Offer several rates in turn; returns what became of the requests of each."""
    headers = {"Content-Type": "image/jpeg", **TO_VARIANT}
    request = connection.post("127.0.0.1", running.gateway, PATH, photo, headers)
    rows = []
    for load in LOADS:
        replies = open_loop.run("127.0.0.1", running.gateway, request, load * carried, seconds, seed=1)
        counts = Counter(reply.status for reply in replies)
        good_ms = sorted(reply.latency_s * 1e3 for reply in replies if reply.status == HTTPStatus.OK)
        rows.append(
            {
                "offered": round(len(replies) / seconds, 1),
                "load": load,
                "answered": round(counts[HTTPStatus.OK] / seconds, 1),
                "refused": round(counts[HTTPStatus.TOO_MANY_REQUESTS] / seconds, 1),
                "lost": len(replies) - counts[HTTPStatus.OK] - counts[HTTPStatus.TOO_MANY_REQUESTS],
                "p50_ms": round(percentile(good_ms, 50), 1) if good_ms else None,
                "p99_ms": round(percentile(good_ms, 99), 1) if good_ms else None,
            }
        )
    return rows


def missed(rows: list[dict[str, Any]], loads: list[dict[str, Any]]) -> list[str]:
    """Name what misses its target."""
    found = []
    for row in rows:
        ratio, unit = row["of_direct"], row["unit"]
        if row["path"] != GATEWAY or ratio is None:
            continue
        if (unit == "images/s" and ratio < LEAST_RATE) or (unit == "ms (p99)" and ratio > MOST_P99):
            found.append(f"{row['photo']}, {unit}: {ratio}")
    if (goodput := kept(loads)) < LEAST_GOODPUT:
        found.append(f"goodput at {loads[-1]['load']} x: {goodput} of the best")
    if lost := sum(load["lost"] for load in loads):
        found.append(f"{lost} requests neither answered nor refused")
    return found


def kept(loads: list[dict[str, Any]]) -> float:
    """Return the share of the best goodput that is left at the highest load; nothing if there was none."""
    best: float = max(load["answered"] for load in loads)
    return round(float(loads[-1]["answered"]) / best, 3) if best else 0.0


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row as text, for the table and the page alike."""
    ratio = "" if row["of_direct"] is None else str(row["of_direct"])
    return [row["photo"], row["path"], row["unit"], str(row["median"]), ratio]


def load_cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the open loop as text."""
    names = ("offered", "load", "answered", "refused", "lost", "p50_ms", "p99_ms")
    return ["" if row[name] is None else str(row[name]) for name in names]


def markdown(rows: list[dict[str, Any]]) -> str:
    """Render the rows as the page's table; a test compares the two."""
    return record.markdown(HEADINGS, map(cells, rows))


def load_markdown(rows: list[dict[str, Any]]) -> str:
    """Render the rows of the open loop as the page's table; a test compares the two."""
    return record.markdown(LOAD_HEADINGS, map(load_cells, rows))


def main() -> int:
    """Measure, print, record; exit status 1 if a target is missed."""
    parser = record.parser(__doc__, rounds=5, seconds=5.0)
    args = record.parsed(parser)
    if not wrk.is_installed():
        parser.error(wrk.MISSING)
    series: Series = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch)) as running:
        for _ in range(args.rounds):
            _measure_round(running, Path(scratch), args.seconds, series)
        rows = summarise(series)
        small = next(iter(photos.SIZES_WH))
        carried = statistics.median(series[small, GATEWAY, "images/s"])
        loads = _overload(running, photos.jpeg(photos.SIZES_WH[small]), carried, 3 * args.seconds)
    generator_s = resource.getrusage(resource.RUSAGE_SELF)
    record.show(HEADINGS, zip(map(cells, rows), rows, strict=True))
    print(load_markdown(loads), f"goodput kept: {kept(loads)}", sep="")
    print(f"CPU of the open-loop generator, in all: {generator_s.ru_utime + generator_s.ru_stime:.1f} s")
    result = {"concurrency": CONCURRENCY, "rounds": args.rounds, "kept": kept(loads)}
    args.record.write(result | {"rows": rows, "loads": loads})
    for miss in missed(rows, loads):
        print(f"target missed: {miss}", file=sys.stderr)
    return 1 if missed(rows, loads) else 0


if __name__ == "__main__":
    record.end(main)

"""The cost of the REST gateway, and its behaviour under twice the load that it can carry.

In every round the same generator loads Triton and the gateway in front of it, at the same concurrency.
Then an open loop sends requests at rates from 0.8 to 2 times the rate that the gateway carried.

    python -m loadtest.gateway [--rounds 5] [--seconds 5]       needs `wrk` (Debian: apt-get install wrk)
"""

import contextlib
import os
import resource
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path

from loadtest import record, resource_usage, servers, wrk
from nereid.contract import VARIANT_HEADER
from nereid.server.embedded_server import infer_path
from nereid.tune import load_generator, photos
from nereid.tune.load_generator import HOST, latencies_ms, percentile

PATH = "/predict"
CONCURRENCY = 32
TO_VARIANT = {VARIANT_HEADER: "v1"}
DIRECT, GATEWAY = "Triton", "gateway"
HEADINGS = ("photo", "path", "unit", "median", "of Triton's")
LOADS = (0.8, 1.0, 1.2, 2.0)
LOAD_HEADINGS = ("offered", "of the rate carried", "answered/s", "refused/s", "lost", "p50 ms", "p99 ms")
LOAD_COLUMNS = ("offered", "load", "answered", "refused", "lost", "p50_ms", "p99_ms")
# Shares of Triton's throughput, of its p99, and of the best goodput at twice the load.
MIN_RATE, MAX_P99, MIN_GOODPUT = 0.85, 1.5, 0.9

Series = dict[tuple[str, str, str], list[float]]


@dataclass(frozen=True, slots=True)
class Served:
    """The ports of a server and of the gateway in front of it, and the gateway's pid."""

    triton: int
    gateway: int
    pid: int


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Run server and gateway, and wait until both are ready."""
    with servers.served(folder, os.environ) as server:
        ports = server.options.ports
        with servers.gateway(ports.http) as gateway:
            yield Served(ports.http, gateway.port, gateway.pid)


def _measure_round(running: Served, folder: Path, seconds: float, series: Series) -> None:
    for name, size_wh in photos.SIZES_WH.items():
        photo = folder / f"{name}.jpg"
        photo.write_bytes(photos.jpeg(size_wh))
        direct = partial(wrk.post, running.triton, infer_path("classify"), photo)
        through = partial(wrk.post, running.gateway, PATH, photo)
        for path, post in ((DIRECT, direct), (GATEWAY, through)):
            post(1, 1.0, TO_VARIANT)  # drains the queues of the load before
            began_s = resource_usage.cpu_s(running.pid)
            load = post(CONCURRENCY, seconds, TO_VARIANT)
            series[name, path, "images/s"].append(load.rate)
            series[name, path, "ms (p99)"].append(load.p99_ms)
            if path == GATEWAY:
                spent_ms = (resource_usage.cpu_s(running.pid) - began_s) * 1e3
                series[name, path, "ms of CPU"].append(spent_ms / load.answered)


def summarise(series: Series) -> list[record.Row]:
    """Return a row per photo, path and unit: medians, and the median of the rounds' ratios to Triton's."""
    rows = []
    for (photo, path, unit), values in series.items():
        base = series.get((photo, DIRECT, unit))
        ratio = record.median_ratio(values, base) if base else None
        rows.append(
            {"photo": photo, "path": path, "unit": unit, **record.spread(values, 2), "of_direct": ratio}
        )
    return rows


def _overload(running: Served, photo: bytes, carried: float, seconds: float) -> list[record.Row]:
    """Offer several rates in turn; returns a row about the requests of each."""
    headers = {"Content-Type": "image/jpeg", **TO_VARIANT}
    request = load_generator.post_request(HOST, running.gateway, PATH, photo, headers)
    rows = []
    for load in LOADS:
        responses = load_generator.open_loop(HOST, running.gateway, request, load * carried, seconds, seed=1)
        counts, good_ms = Counter(each.status for each in responses), latencies_ms(responses)
        rows.append(
            {
                "offered": round(len(responses) / seconds, 1),
                "load": load,
                "answered": round(counts[HTTPStatus.OK] / seconds, 1),
                "refused": round(counts[HTTPStatus.TOO_MANY_REQUESTS] / seconds, 1),
                "lost": len(responses) - counts[HTTPStatus.OK] - counts[HTTPStatus.TOO_MANY_REQUESTS],
                "p50_ms": round(percentile(good_ms, 50), 1) if good_ms else None,
                "p99_ms": round(percentile(good_ms, 99), 1) if good_ms else None,
            }
        )
    return rows


def missed(rows: list[record.Row], loads: list[record.Row]) -> list[str]:
    """Return the missed targets."""
    found = []
    for row in rows:
        ratio, unit = row["of_direct"], row["unit"]
        if row["path"] != GATEWAY or ratio is None:
            continue
        if (unit == "images/s" and ratio < MIN_RATE) or (unit == "ms (p99)" and ratio > MAX_P99):
            found.append(f"{row['photo']}, {unit}: {ratio}")
    if (goodput := kept(loads)) < MIN_GOODPUT:
        found.append(f"goodput at {loads[-1]['load']} x: {goodput} of the best")
    if lost := sum(load["lost"] for load in loads):
        found.append(f"{lost} requests neither answered nor refused")
    return found


def kept(loads: list[record.Row]) -> float:
    """Return the goodput at the highest load as a share of the best, or 0 if nothing was answered."""
    best: float = max(load["answered"] for load in loads)
    return round(float(loads[-1]["answered"]) / best, 3) if best else 0.0


def load_cells(row: record.Row) -> list[str]:
    """Return a row of the open loop as text."""
    return ["" if row[name] is None else str(row[name]) for name in LOAD_COLUMNS]


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/gateway.md."""
    ratios = ("" if row["of_direct"] is None else row["of_direct"] for row in rows)
    names = ("photo", "path", "unit", "median")
    return record.markdown(
        HEADINGS, ([*(row[n] for n in names), ratio] for row, ratio in zip(rows, ratios, strict=True))
    )


def load_markdown(rows: list[record.Row]) -> str:
    """Render the rows of the open loop as the other table of docs/gateway.md."""
    return record.markdown(LOAD_HEADINGS, map(load_cells, rows))


def main() -> int:
    """Measure, print and record; exit status 1 if a target is missed."""
    args = record.parsed(record.parser(__doc__, rounds=5, seconds=5.0), wrk.missing())
    series: Series = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch)) as running:
        for _ in range(args.rounds):
            _measure_round(running, Path(scratch), args.seconds, series)
        rows = summarise(series)
        small = next(iter(photos.SIZES_WH))
        carried = statistics.median(series[small, GATEWAY, "images/s"])
        loads = _overload(running, photos.jpeg(photos.SIZES_WH[small]), carried, 3 * args.seconds)
    generator_s = resource.getrusage(resource.RUSAGE_SELF)
    print(markdown(rows), load_markdown(loads), sep="\n")
    print(f"goodput kept: {kept(loads)}")
    print(f"CPU of the open loop's generator: {generator_s.ru_utime + generator_s.ru_stime:.1f} s")
    result = {"concurrency": CONCURRENCY, "rounds": args.rounds, "kept": kept(loads)}
    return record.finish(args.record, result | {"rows": rows, "loads": loads}, missed(rows, loads))


if __name__ == "__main__":
    record.end(main)

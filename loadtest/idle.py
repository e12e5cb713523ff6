"""The price of a server that nobody uses: wake-ups, CPU, threads and memory of each kind of process.

python -m loadtest.idle [--rounds 3] [--seconds 30] [--record idle]

Then each variant classifies a photo for one caller, and for eight, and the memory is read again.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil

from loadtest import record, resource_usage, servers, wrk
from nereid import assets
from nereid.server.embedded_server import infer_path
from nereid.triton import stub_processes

VARIANTS = ("classify_v1", "classify_v2")
SETTLE_S, LOAD_S, CONCURRENCY = 10.0, 5.0, 8
SUPERVISOR, SERVER, TOTAL = "nereid serve", "tritonserver", "all"
MAX_WAKE_UPS, MAX_IDLE_MB, MAX_LOADED_MB, MAX_THREADS = 50, 330, 380, 150
HEADINGS = ("process", "number", "threads", "wake-ups/s", "CPU, %", "memory idle, MB", "after load, MB")


@dataclass(frozen=True, slots=True)
class Sample:
    """One kind of process over a time: wake-ups per second, per cent of a core, and PSS in MB."""

    processes: int
    threads: int
    wake_ups: float
    cpu: float
    memory_mb: float

    def __add__(self, other: "Sample") -> "Sample":
        return Sample(*(ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True)))


def kinds(supervisor: int, server: int, repository: Path) -> dict[int, str]:
    """Return the pids of a supervised server, each with the kind of the process."""
    stubs = {each.process.pid: f"of `{each.model}`" for each in stub_processes.find(server, repository)}
    return {supervisor: SUPERVISOR, server: SERVER, **stubs}


def wake_ups(pid: int) -> int:
    """Return how often the threads of a process have waited for something so far."""
    return sum(_switches(Path(f"/proc/{pid}/task")))


def _switches(tasks: Path) -> Iterator[int]:
    for task in tasks.iterdir():
        lines = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        yield int(lines["voluntary_ctxt_switches"])


def observe(pids: Mapping[int, str], seconds: float) -> dict[str, Sample]:
    """Watch idle processes for some seconds; returns what each kind took, and all together."""

    def counters() -> dict[int, tuple[int, float]]:
        return {pid: (wake_ups(pid), sum(psutil.Process(pid).cpu_times()[:2])) for pid in pids}

    before = counters()
    time.sleep(seconds)
    after = counters()
    found: dict[str, Sample] = {}
    for pid, kind in pids.items():
        (woken, used), (woken_before, used_before) = after[pid], before[pid]
        sample = Sample(
            1,
            psutil.Process(pid).num_threads(),
            (woken - woken_before) / seconds,
            (used - used_before) / seconds * 100,
            memory_mb(pid),
        )
        for name in (kind, TOTAL):
            found[name] = found[name] + sample if name in found else sample
    return {**{name: each for name, each in found.items() if name != TOTAL}, TOTAL: found[TOTAL]}


def memory_mb(pid: int) -> float:
    """Return the memory (PSS) of one process."""
    return float(psutil.Process(pid).memory_full_info().pss / resource_usage.MB)


def load(port: int, photo: Path) -> dict[str, dict[str, float]]:
    """Send a photo to each variant from one caller, then from several; return the latencies of one in ms."""
    alone = {}
    for variant in VARIANTS:
        found = wrk.post(port, infer_path(variant), photo, 1, LOAD_S)
        alone[variant] = {"p50": found.p50_ms, "p99": found.p99_ms}
        wrk.post(port, infer_path(variant), photo, CONCURRENCY, LOAD_S)
    return alone


def summarise(rounds: Sequence[tuple[dict[str, Sample], Mapping[str, float]]]) -> list[record.Row]:
    """Return a row for each kind of process, with medians over the rounds."""
    rows = []
    for kind in rounds[0][0]:
        samples = [each[kind] for each, _ in rounds]
        loaded = statistics.median(loaded[kind] for _, loaded in rounds)
        rows.append(
            {
                "process": kind,
                "number": samples[0].processes,
                "threads": round(statistics.median(s.threads for s in samples)),
                "wake_ups": round(statistics.median(s.wake_ups for s in samples), 1),
                "cpu_percent": round(statistics.median(s.cpu for s in samples), 2),
                "memory_mb": round(statistics.median(s.memory_mb for s in samples)),
                "loaded_mb": round(loaded),
            }
        )
    return rows


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/capacity.md."""
    return record.markdown(HEADINGS, ([*row.values()] for row in rows))


def missed(rows: list[record.Row]) -> list[str]:
    """Return the targets that all processes together miss."""
    total = next(row for row in rows if row["process"] == TOTAL)
    targets = {
        "wake_ups": MAX_WAKE_UPS,
        "threads": MAX_THREADS,
        "memory_mb": MAX_IDLE_MB,
        "loaded_mb": MAX_LOADED_MB,
    }
    return [
        f"{name}: at most {limit}, got {total[name]}"
        for name, limit in targets.items()
        if total[name] > limit
    ]


def _measure_round(
    repository: Path, folder: Path, seconds: float
) -> tuple[dict[str, Sample], dict[str, float], dict[str, dict[str, float]]]:
    folder.mkdir()
    photo = shutil.copy(assets.COFFEE, folder)
    with servers.supervised(repository, folder, os.environ) as running:
        pids = kinds(running.pid, running.record.pid, repository)
        time.sleep(SETTLE_S)
        idle = observe(pids, seconds)
        alone = load(running.record.ports.http, Path(photo))
        time.sleep(1)
        loaded: dict[str, float] = defaultdict(float)
        for pid, kind in pids.items():
            loaded[kind] += memory_mb(pid)
        loaded[TOTAL] = sum(loaded.values())
        return idle, dict(loaded), alone


def main() -> int:
    """Measure, print and record; exit status 1 if a target is missed."""
    args = record.parsed(record.parser(__doc__, rounds=3, seconds=30), wrk.missing())
    rounds, latencies = [], []
    with tempfile.TemporaryDirectory() as scratch:
        repository = shutil.copytree(assets.REPOSITORY, Path(scratch) / "repository")
        for number in range(args.rounds):
            idle, loaded, alone = _measure_round(repository, Path(scratch) / str(number), args.seconds)
            rounds.append((idle, loaded))
            latencies.append(alone)
            print(alone, file=sys.stderr)
    rows = summarise(rounds)
    print(markdown(rows))
    medians = {
        variant: {key: statistics.median(each[variant][key] for each in latencies) for key in ("p50", "p99")}
        for variant in VARIANTS
    }
    result = {"rounds": args.rounds, "seconds": args.seconds, "alone_ms": medians, "rows": rows}
    return record.finish(args.record, result, missed(rows))


if __name__ == "__main__":
    record.end(main)

"""The visibility of a stalled server in load tests: a closed loop sends nothing while it waits.

The server's processes are stopped for half a second at intervals, under a closed loop of a few callers and
then under an open loop.

    python -m loadtest.stall [--seconds 24] [--rate 20] [--record stall]
"""

import contextlib
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from loadtest import load, record, resource_usage
from loadtest.servers import served

STALL_S = 0.5
CALLERS = 2
# A valid load test shows at least this part of the stall in its p99.
SEEN_MS = STALL_S * 1e3 / 2
HEADINGS = ("loop", "requests", "p50", "p90", "p99", "max")


@contextlib.contextmanager
def stalls(pid: int, every_s: float) -> Iterator[None]:
    """Stop a process and its descendants for half a second in every `every_s` of the context.

    Raises:
        psutil.NoSuchProcess: the process ended during the context.
    """
    over = threading.Event()

    def stall() -> None:
        while not over.wait(every_s - STALL_S):
            tree = resource_usage.tree(pid)
            try:
                _signal(tree, signal.SIGSTOP)
                over.wait(STALL_S)
            finally:
                _signal(tree, signal.SIGCONT)

    with ThreadPoolExecutor(1) as pool:
        stalling = pool.submit(stall)
        try:
            yield
        finally:
            over.set()
    stalling.result()


def _signal(tree: list[psutil.Process], number: signal.Signals) -> None:
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def measure(folder: Path, seconds: float, rate: float, every_s: float) -> list[record.Row]:
    """Run both loops under stalls; returns the report of each.

    Raises:
        SystemExit: a request failed, so the latencies are invalid.
    """
    loops = {"closed": [f"--users={CALLERS}"], "open": [f"--users={load.POOL}", f"--rate={rate}"]}
    reports = []
    with served(folder, os.environ) as server:
        ports = server.options.ports
        target = load.Target(f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}")
        for loop, words in loops.items():
            path = folder / f"{loop}.json"
            with stalls(server.pid, every_s):
                code = load.run_locust(
                    target, seconds, path, [f"--scenario={loop}", "--thresholds=", *words, "HttpCaller"]
                )
            if code:
                raise SystemExit(f"requests of the {loop} loop failed")
            reports.append(load.read(path))
    return reports


def summarise(reports: list[record.Row]) -> list[record.Row]:
    """Return a row for each loop."""
    return [
        {"loop": report["scenario"], "requests": row["requests"]}
        | {name: row["response_ms"][name] for name in ("p50", "p90", "p99", "max")}
        for report in reports
        for row in report["rows"]
    ]


def _cells(row: record.Row) -> list[str]:
    return [row["loop"], f"{row['requests']:,}", *(f"{row[name]:.0f} ms" for name in HEADINGS[2:])]


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/load_testing.md."""
    return record.markdown(HEADINGS, map(_cells, rows))


def main() -> int:
    """Measure, print and record; exit status 1 if the open loop does not show the stall."""
    args = record.parsed(record.parser(__doc__, seconds=24.0, rate=20.0, every_s=8.0))
    with tempfile.TemporaryDirectory() as folder:
        rows = summarise(measure(Path(folder), args.seconds, args.rate, args.every_s))
    print(markdown(rows))
    about = {"stall_s": STALL_S, "every_s": args.every_s, "callers": CALLERS, "rate_per_s": args.rate}
    seen = {row["loop"]: row["p99"] >= SEEN_MS for row in rows}
    print(f"p99 of at least {SEEN_MS:.0f} ms: {seen}")
    missed = [] if seen["open"] else [f"the open loop has a p99 below {SEEN_MS:.0f} ms"]
    return record.finish(args.record, about | {"rows": rows}, missed)


if __name__ == "__main__":
    record.end(main)

"""The downtime of a service when one of its processes is killed under load and `nereid serve` repairs it.

In every round a fresh `nereid serve` loses one stub of each model, then `tritonserver`. Callers send
requests over HTTP and gRPC at a rate far below saturation. A request inside the killed process may never
be answered. Requests that wait for such a request fail one per second (Triton 24.10). So the result has
two times: from when on every new request succeeds, and when the last error came.

    python -m loadtest.recovery [--rounds 3]
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from loadtest import record, servers
from loadtest.background_load import BackgroundLoad, Request
from nereid import assets
from nereid.server import run_dir
from nereid.triton import stub_processes

CONCURRENCY = 4
PUBLIC_NAME, SERVER = "classify", "tritonserver"
TIMEOUT_S, PAUSE_S = 5.0, 0.05
# Recovery is complete after this time without a failed request.
CALM_S, WATCHDOG_S = 4.0, 120.0
BEFORE_S = 1.0
GOALS_S = {"stub": 3.0, SERVER: 15.0}
HEADINGS = ("killed", "back after", "worst", "goal", "last error", "failed", "unanswered")


def is_unanswered(request: Request) -> bool:
    """Check whether a request timed out at its caller."""
    return bool(request.failure) and request.end_s - request.begin_s >= TIMEOUT_S * 0.9


def is_calm(requests: list[Request], since_s: float, calm_s: float = CALM_S) -> bool:
    """Check whether no request failed in the last seconds, and some succeeded."""
    now = time.monotonic()
    recent = [each for each in list(requests) if each.end_s > now - calm_s]
    return now - since_s > calm_s and bool(recent) and not any(each.failure for each in recent)


def is_ready(server: run_dir.ServerRecord) -> bool:
    """Return whether the supervisor reports that the server is ready."""
    with contextlib.suppress(OSError):
        url = f"http://{server.host}:{server.health_port}/readyz"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return bool(response.status == 200)
    return False


def _kill(server: run_dir.ServerRecord, model: str, pid: int) -> list[Request]:
    """Kill a process under load; returns the requests that ended afterwards, by seconds since then."""
    with BackgroundLoad(server, model, CONCURRENCY, PAUSE_S, TIMEOUT_S) as load:
        time.sleep(BEFORE_S)
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while not (is_calm(load.requests, killed_s) and is_ready(server)):
            if time.monotonic() - killed_s > WATCHDOG_S:
                raise SystemExit(f"'{model}' did not recover within {WATCHDOG_S:.0f} s of a killed process")
            time.sleep(0.1)
    return [
        Request(each.begin_s - killed_s, each.end_s - killed_s, each.failure)
        for each in load.requests
        if each.end_s > killed_s
    ]


def back_after_s(requests: list[Request]) -> float:
    """Return the begin of the first request from which on all succeeded, in seconds after the kill."""
    last = max((each.begin_s for each in requests if each.failure), default=float("-inf"))
    return max(0.0, min(each.begin_s for each in requests if each.begin_s > last))


def last_error_s(requests: list[Request]) -> float:
    """Return the time of the last error after the kill; requests without any response do not count."""
    return max((each.end_s for each in requests if each.failure and not is_unanswered(each)), default=0.0)


def summarise(outcomes: Mapping[str, list[list[Request]]]) -> list[record.Row]:
    """Return a row for each killed process, from the requests of each round."""
    return [
        {"killed": killed}
        | record.spread(map(back_after_s, rounds), 2)
        | {
            "last_error_max": round(max(map(last_error_s, rounds)), 2),
            "failed": statistics.median(sum(bool(one.failure) for one in each) for each in rounds),
            "unanswered": statistics.median(sum(map(is_unanswered, each)) for each in rounds),
            "goal": GOALS_S[SERVER if killed == SERVER else "stub"],
        }
        for killed, rounds in outcomes.items()
    ]


def _cells(row: record.Row) -> list[str]:
    killed = SERVER if row["killed"] == SERVER else f"a stub of `{row['killed']}`"
    times = f"{row['median']:.1f} s", f"{row['max']:.1f} s", f"{row['goal']:g} s"
    return [
        killed,
        *times,
        f"{row['last_error_max']:.1f} s",
        f"{row['failed']:g}",
        f"{row['unanswered']:g}",
    ]


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/supervision.md."""
    return record.markdown(HEADINGS, map(_cells, rows))


def _measure_round(repository: Path, folder: Path, outcomes: dict[str, list[list[Request]]]) -> None:
    folder.mkdir()
    with servers.supervised(repository, folder, os.environ) as running:
        server = running.record
        for model in sorted({stub.model for stub in stub_processes.find(server.pid, repository)}):
            victim = next(stub for stub in stub_processes.find(server.pid, repository) if stub.model == model)
            outcomes[model].append(_kill(server, model, victim.process.pid))
        outcomes[SERVER].append(_kill(server, PUBLIC_NAME, running.record.pid))


def main() -> int:
    """Measure, print and record; exit status 1 if a goal is missed."""
    args = record.parsed(record.parser(__doc__, rounds=3))
    outcomes: dict[str, list[list[Request]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        repository = shutil.copytree(assets.REPOSITORY, Path(scratch) / "repository")
        for number in range(args.rounds):
            _measure_round(repository, Path(scratch) / str(number), outcomes)
            print(json.dumps({name: round(back_after_s(each[-1]), 2) for name, each in outcomes.items()}))
    rows = summarise(outcomes)
    print(markdown(rows))
    result = {"concurrency": CONCURRENCY, "pause_s": PAUSE_S, "rounds": args.rounds, "rows": rows}
    missed = [f"{row['killed']} was back after {row['max']} s" for row in rows if row["max"] > row["goal"]]
    return record.finish(args.record, result, missed)


if __name__ == "__main__":
    record.end(main)

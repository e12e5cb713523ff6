"""How long a service is away when a process of it is killed under load, while `nereid serve` looks after it.

In every round a fresh `nereid serve` loses one stub of each model, one after the other, then `tritonserver`.
Callers ask the model in question over HTTP and gRPC, together well below what it can do. A request that was
in the killed process may never be answered, and those that wait for it fail one a second (Triton 24.10). So
two times are told: from when on every request that is sent succeeds, and when the last error has come.

    python -m loadtest.recovery [--rounds 3]
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest import record, servers
from loadtest.callers import Callers, Request
from nereid import assets
from nereid.server import run_dir, stubs

CONCURRENCY = 4
PUBLIC_NAME, SERVER = "classify", "tritonserver"
# A caller's patience with one request, and its pause before the next.
TIMEOUT_S, PAUSE_S = 5.0, 0.05
# All is well after so long without a failed request.
CALM_S, WATCHDOG_S = 4.0, 120.0
BEFORE_S = 1.0
GOALS_S = {"stub": 3.0, SERVER: 15.0}
HEADINGS = ("killed", "back after", "worst", "goal", "last error", "failed", "unanswered")


def is_unanswered(request: Request) -> bool:
    """Tell whether nothing came until the caller gave up."""
    return bool(request.failure) and request.end_s - request.begin_s >= TIMEOUT_S * 0.9


def is_calm(requests: list[Request], since_s: float) -> bool:
    """Tell whether nothing failed of late, and something succeeded."""
    now = time.monotonic()
    recent = [each for each in list(requests) if each.end_s > now - CALM_S]
    return now - since_s > CALM_S and bool(recent) and not any(each.failure for each in recent)


def _is_ready(server: run_dir.ServerRecord) -> bool:
    with contextlib.suppress(OSError):
        url = f"http://{server.host}:{server.health_port}/readyz"
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    return False


def _lose(server: run_dir.ServerRecord, model: str, pid: int) -> list[Request]:
    """Kill a process while a model is asked; returns the requests that ended after."""
    with Callers(server, model, CONCURRENCY, PAUSE_S, TIMEOUT_S) as callers:
        time.sleep(BEFORE_S)
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while not (is_calm(callers.requests, killed_s) and _is_ready(server)):
            if time.monotonic() - killed_s > WATCHDOG_S:
                raise SystemExit(f"'{model}' is not back {WATCHDOG_S:.0f} s after a process of it was killed")
            time.sleep(0.1)
    return [
        Request(each.begin_s - killed_s, each.end_s - killed_s, each.failure)
        for each in callers.requests
        if each.end_s > killed_s
    ]


def back_after_s(requests: list[Request]) -> float:
    """Return how long after the kill the first request was sent since which all have succeeded."""
    last = max((each.begin_s for each in requests if each.failure), default=float("-inf"))
    return max(0.0, min(each.begin_s for each in requests if each.begin_s > last))


def last_error_s(requests: list[Request]) -> float:
    """Return how long after the kill the last error came; requests without any answer do not count."""
    return max((each.end_s for each in requests if each.failure and not is_unanswered(each)), default=0.0)


def summarise(outcomes: Mapping[str, list[list[Request]]]) -> list[dict[str, Any]]:
    """Return a row for each killed process, from the requests of each round."""
    rows = []
    for killed, rounds in outcomes.items():
        back = [back_after_s(each) for each in rounds]
        rows.append(
            {
                "killed": killed,
                "median": round(statistics.median(back), 2),
                "min": round(min(back), 2),
                "max": round(max(back), 2),
                "last_error_max": round(max(map(last_error_s, rounds)), 2),
                "failed": statistics.median(sum(bool(one.failure) for one in each) for each in rounds),
                "unanswered": statistics.median(sum(is_unanswered(one) for one in each) for each in rounds),
                "goal": GOALS_S[SERVER if killed == SERVER else "stub"],
            }
        )
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row as text, for the table and the page alike."""
    killed = SERVER if row["killed"] == SERVER else f"a stub of `{row['killed']}`"
    seconds = [f"{row[name]:.1f} s" for name in ("median", "max")]
    rest = [
        f"{row['goal']:g} s",
        f"{row['last_error_max']:.1f} s",
        f"{row['failed']:g}",
        f"{row['unanswered']:g}",
    ]
    return [killed, *seconds, *rest]


def markdown(rows: list[dict[str, Any]]) -> str:
    """Render the rows as the page's table; a test compares the two."""
    return record.markdown(HEADINGS, map(cells, rows))


def _measure_round(repository: Path, folder: Path, outcomes: dict[str, list[list[Request]]]) -> None:
    folder.mkdir()
    with servers.supervised(repository, folder, os.environ) as running:
        server = running.record
        for model in sorted({stub.model for stub in stubs.find(server.pid, repository)}):
            victim = next(stub for stub in stubs.find(server.pid, repository) if stub.model == model)
            outcomes[model].append(_lose(server, model, victim.process.pid))
        outcomes[SERVER].append(_lose(server, PUBLIC_NAME, running.record.pid))


def main() -> int:
    """Measure, print, record; exit status 1 if a goal is missed."""
    args = record.parsed(record.parser(__doc__, rounds=3))
    outcomes: dict[str, list[list[Request]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        repository = shutil.copytree(assets.REPOSITORY, Path(scratch) / "repository")
        for number in range(args.rounds):
            _measure_round(repository, Path(scratch) / str(number), outcomes)
            print(json.dumps({name: round(back_after_s(each[-1]), 2) for name, each in outcomes.items()}))
    rows = summarise(outcomes)
    record.show(HEADINGS, ((cells(row), row) for row in rows))
    result = {"concurrency": CONCURRENCY, "pause_s": PAUSE_S, "rounds": args.rounds}
    args.record.write(result | {"rows": rows})
    missed = [row for row in rows if row["max"] > row["goal"]]
    for row in missed:
        print(f"goal missed: {row['killed']} was back after {row['max']} s", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    record.end(main)

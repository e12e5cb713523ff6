"""The downtime of a service when one of its processes is killed under load and `nereid serve` repairs it.

In every round a fresh `nereid serve` loses one stub of each model, then `tritonserver`. Callers send
requests over HTTP and gRPC at a rate far below saturation. A request inside the killed process may never
be answered. Requests that wait for such a request fail one per second (Triton 24.10). So the result has
two times: from when on every new request succeeds, and when the last error came.

    python -m loadtest.recovery [--rounds 3]
"""

import json
import math
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from loadtest import record, servers
from loadtest.torture.traffic import Failure, Span, Traffic, classifiers
from nereid.backends.triton import stub_processes
from nereid.base import assets

CONCURRENCY, PER_S, TIMEOUT_S = 4, 10.0, 5.0
PUBLIC_NAME, SERVER = "classify", "tritonserver"
# Recovery is complete after this time without a failed request.
CALM_S, WATCHDOG_S = 4.0, 120.0
BEFORE_S = 1.0
GOALS_S = {"stub": 3.0, SERVER: 15.0}
COLUMNS: record.Columns = {
    "killed": lambda row: SERVER if row["killed"] == SERVER else f"a stub of `{row['killed']}`",
    "back after": "{median:.1f} s",
    "worst": "{max:.1f} s",
    "goal": "{goal:g} s",
    "last error": "{last_error_max:.1f} s",
    "failed": "{failed:g}",
    "unanswered": "{unanswered:g}",
}


class Outage(NamedTuple):
    """Failed requests, and the begin of the first one from which on all succeeded; in s after the kill."""

    failures: list[Failure]
    back_s: float


def is_unanswered(failure: Failure) -> bool:
    """Check whether a request timed out at its caller."""
    return failure.end_s - failure.begin_s >= TIMEOUT_S * 0.9


def _kill(running: servers.Supervised, model: str, pid: int) -> Outage:
    """Kill a process under load."""
    answered: list[Span] = []
    url = running.server_info.url
    with Traffic(classifiers(url, model, CONCURRENCY, PER_S, TIMEOUT_S, answered=answered)) as traffic:
        time.sleep(BEFORE_S)
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        traffic.wait_calm(f"a killed process of '{model}'", CALM_S, WATCHDOG_S, running.is_ready)
    if wrong := [text for tally in traffic.tallies for text in tally.wrong]:
        raise SystemExit(f"wrong outcomes after a killed process of '{model}': {wrong[:5]}")
    failures = [
        Failure(failure.end_s - killed_s, failure.begin_s - killed_s, failure.text)
        for failure in traffic.failures(killed_s)
    ]
    last_s = max((failure.begin_s for failure in failures), default=-math.inf)
    later = [begin_s - killed_s for begin_s, end_s in answered if end_s > killed_s]
    return Outage(failures, max(0.0, min(begin_s for begin_s in later if begin_s > last_s)))


def summarise(outcomes: Mapping[str, list[Outage]]) -> list[record.Row]:
    """Return a row for each killed process, from the outages of each round.

    Requests without any response do not count in the time of the last error.
    """
    last_s = {
        killed: max(
            (failure.end_s for outage in rounds for failure in outage.failures if not is_unanswered(failure)),
            default=0.0,
        )
        for killed, rounds in outcomes.items()
    }
    return [
        {"killed": killed}
        | record.spread((outage.back_s for outage in rounds), 2)
        | {
            "last_error_max": round(last_s[killed], 2),
            "failed": statistics.median(len(outage.failures) for outage in rounds),
            "unanswered": statistics.median(sum(map(is_unanswered, outage.failures)) for outage in rounds),
            "goal": GOALS_S[SERVER if killed == SERVER else "stub"],
        }
        for killed, rounds in outcomes.items()
    ]


def _measure_round(repository: Path, folder: Path, outcomes: dict[str, list[Outage]]) -> None:
    folder.mkdir()
    with servers.supervised(repository, folder, os.environ) as running:
        server_pid = running.server_info.pid
        for model in sorted({stub.model for stub in stub_processes.find(server_pid, repository)}):
            victim = next(stub for stub in stub_processes.find(server_pid, repository) if stub.model == model)
            outcomes[model].append(_kill(running, model, victim.process.pid))
        outcomes[SERVER].append(_kill(running, PUBLIC_NAME, running.server_info.pid))


def main() -> int:
    """Measure, print and record; exit status 1 if a goal is missed."""
    args = record.parsed(record.parser(__doc__, rounds=3))
    outcomes: dict[str, list[Outage]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as scratch:
        repository = shutil.copytree(assets.REPOSITORY, Path(scratch) / "repository")
        for number in range(args.rounds):
            _measure_round(repository, Path(scratch) / str(number), outcomes)
            print(json.dumps({name: round(outages[-1].back_s, 2) for name, outages in outcomes.items()}))
    rows = summarise(outcomes)
    print(record.table(COLUMNS, rows))
    result = {"concurrency": CONCURRENCY, "per_s": PER_S, "rounds": args.rounds, "rows": rows}
    missed = [f"{row['killed']} was back after {row['max']} s" for row in rows if row["max"] > row["goal"]]
    return record.finish(args.record, result, missed)


if __name__ == "__main__":
    record.end(main)

"""Attack a guarded server while a steady client uses it, then send random changes of requests.

One caller with a key of its own sends all known attacks in a loop, on several connections, together with
images of 64 megapixels. The steady client has another key. Attackers are processes of their own.

    python -m loadtest.attack [--seconds 60] [--cases 20000]
"""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from loadtest import record, resource_usage, servers
from loadtest.attack.attackers import attackers
from loadtest.attack.attacks import Front
from loadtest.attack.fuzz import fuzz
from loadtest.background_load import BackgroundLoad, Request
from nereid import assets
from nereid.gateway.admission import key_changes
from nereid.server import run_dir

ATTACKERS, PERIOD_S, WARM_UP_S = 4, 0.25, 2.0
MAX_P99_RATIO = 3.0
HEADINGS = ("attackers", "attacks", "requests", "failed", "p50 ms", "p99 ms")


@dataclass(frozen=True, slots=True)
class Steady:
    """The address that the steady client uses."""

    record: run_dir.ServerRecord

    def url(self, protocol: str) -> str:
        """Return HOST:PORT of the gateway."""
        return f"{self.record.host}:{getattr(self.record.ports, protocol)}"


def measured(steady: Steady, front: Front, count: int, seconds: float) -> record.Row:
    """Return what the steady client saw while attackers were at work."""
    with attackers(front, count) as statuses, BackgroundLoad(steady, "classify", 1, PERIOD_S) as load:
        time.sleep(WARM_UP_S + seconds)
    begin_s = load.requests[0].begin_s + WARM_UP_S
    requests = [each for each in load.requests if each.begin_s >= begin_s]
    failed = sum(bool(each.failure) for each in requests)
    p50_ms, p99_ms = (round(quantile_ms(requests, share), 1) for share in (0.5, 0.99))
    values = count, statuses.total(), len(requests), failed, p50_ms, p99_ms
    return {**dict(zip(HEADINGS, values, strict=True)), "statuses": dict(sorted(statuses.items()))}


def quantile_ms(requests: list[Request], share: float) -> float:
    """Return a quantile of the durations in ms."""
    durations = sorted(each.end_s - each.begin_s for each in requests)
    return durations[min(len(durations) - 1, int(share * len(durations)))] * 1e3


def markdown(rows: list[record.Row]) -> str:
    """Render the steady client's rows as the table of docs/security.md."""
    return record.markdown(HEADINGS, [[each[name] for name in HEADINGS] for each in rows])


def main() -> int:
    """Measure, print and record."""
    parser = record.parser(__doc__ or "", seconds=60.0, cases=20_000, seed=1)
    args = record.parsed(parser)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        keys = folder / "keys.json"
        secret = key_changes.add(keys, "attacker", ["infer"], None)
        words = ("--guard", "--keys", str(keys))
        with servers.supervised(assets.REPOSITORY, folder, os.environ, words) as running:
            steady = Steady(running.record)
            front = Front(steady.record.ports.http, steady.record.ports.grpc, secret)
            rows = [measured(steady, front, count, args.seconds) for count in (0, ATTACKERS)]
            pids = [each.pid for each in resource_usage.tree(running.pid)]
            outcome = uvloop.run(fuzz(front, pids, args.cases, args.seed))
    print(markdown(rows))
    print(*(f"{status}: {number}" for status, number in sorted(outcome.statuses.items())), sep="\n")
    print(*(f"wrong status {status}: {case}" for status, case in outcome.wrong), sep="\n")
    ratio = round(rows[1]["p99 ms"] / rows[0]["p99 ms"], 2)
    missed = [
        *(["the steady client had failed requests"] if rows[1]["failed"] else []),
        *([f"p99 x {ratio}, at most {MAX_P99_RATIO:g} expected"] if ratio > MAX_P99_RATIO else []),
        *(["random requests got wrong statuses"] if outcome.wrong else []),
    ]
    statuses = {
        "seed": args.seed,
        "cases": args.cases,
        "wrong": len(outcome.wrong),
        "statuses": dict(sorted(outcome.statuses.items())),
    }
    return record.finish(args.record, {"steady": rows, "p99_ratio": ratio, "fuzz": statuses}, missed)


if __name__ == "__main__":
    record.end(main)

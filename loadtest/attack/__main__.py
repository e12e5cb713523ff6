"""Attack a guarded server while a steady client uses it, then send random changes of requests.

One caller with a key of its own sends all known attacks in a loop, on several connections, together with
images of 64 megapixels. The steady client has another key. Attackers are processes of their own.

    python -m loadtest.attack [--seconds 60] [--cases 20000]
"""

import os
import tempfile
import time
from pathlib import Path

import uvloop

from loadtest import record, resource_usage, servers
from loadtest.attack.attackers import attackers
from loadtest.attack.attacks import Front
from loadtest.attack.fuzz import fuzz
from loadtest.torture.traffic import Span, Traffic, classifiers
from nereid.assets import REPOSITORY
from nereid.gateway.admission import key_changes
from nereid.tune.load_generator import percentile

ATTACKERS, PER_S, WARM_UP_S = 4, 4.0, 2.0
MAX_P99_RATIO = 3.0
HEADINGS = ("attackers", "attacks", "requests", "failed", "p50 ms", "p99 ms")


def measured(front: Front, count: int, seconds: float) -> record.Row:
    """Return what the steady client, which has no key, saw while attackers were at work."""
    answered: list[Span] = []
    steady = classifiers(lambda _: f"127.0.0.1:{front.http_port}", "classify", 1, PER_S, answered=answered)
    with attackers(front, count) as statuses, Traffic(steady) as traffic:
        time.sleep(WARM_UP_S)
        answered.clear()
        time.sleep(seconds)
    failed = len(traffic.faults())
    ordered_ms = sorted((end_s - begin_s) * 1e3 for begin_s, end_s in answered)
    p50_ms, p99_ms = (round(percentile(ordered_ms, percent), 1) for percent in (50, 99))
    values = count, statuses.total(), len(answered) + failed, failed, p50_ms, p99_ms
    return {**dict(zip(HEADINGS, values, strict=True)), "statuses": dict(sorted(statuses.items()))}


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
        with servers.supervised(REPOSITORY, folder, os.environ, words) as running:
            ports = running.record.ports
            front = Front(ports.http, ports.grpc, secret)
            rows = [measured(front, count, args.seconds) for count in (0, ATTACKERS)]
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

"""Attack a guarded server while steady clients use it, then send random changes of requests.

One caller with a key of its own sends all known attacks in a loop, on several connections, together with
images of 64 megapixels. The steady clients have another key: one uses REST, one Triton's HTTP, one its gRPC.
Their answers are compared with the right one. Attackers are processes of their own. Rounds with and
without attackers alternate.

    python -m loadtest.attack [--rounds 3] [--seconds 60] [--cases 20000]
"""

import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop

from loadtest import record, resource_usage, servers
from loadtest.attack.attackers import attackers
from loadtest.attack.attacks import Front
from loadtest.attack.fuzz import fuzz
from loadtest.torture.requests import JPEG, Connection, post
from loadtest.torture.traffic import Failed, Kind, Span, Traffic, classifiers
from nereid.base.assets import COFFEE, REPOSITORY
from nereid.gateway import key_changes
from nereid.insight.tune.load_generator import percentile

ATTACKERS, PER_S, WARM_UP_S = 4, 4.0, 2.0
TIMEOUT_S = 30.0
MAX_P99_RATIO, MAX_GATEWAY_MB = 3.0, 400
FIELDS = ("attackers", "attacks", "requests", "failed", "p50 ms", "p99 ms", "gateway's peak MB")
COLUMNS: record.Columns = {name: f"{{{name}}}" for name in FIELDS}
RIGHT = "espresso"


def clients(front: Front, key: str, answered: list[Span]) -> list[Kind]:
    """Return a client for each protocol; `answered` gets begin and end of each request with an answer."""
    ports, photo = {"http": front.http_port, "grpc": front.grpc_port}, COFFEE.read_bytes()

    def send(rest: Connection) -> str:
        begin_s = time.monotonic()
        status, document = post(rest, "/predict", photo, {**JPEG, "X-API-Key": key})
        if status != HTTPStatus.OK:
            raise Failed(f"{status} {document}")
        answered.append((begin_s, time.monotonic()))
        return fault(document["predictions"][0]["label"])

    def fault(label: str) -> str:
        return "" if label == RIGHT else f"expected {RIGHT}, got {label}"

    return [
        Kind("REST", PER_S, lambda _: closing(Connection("127.0.0.1", ports["http"], TIMEOUT_S)), send),
        *classifiers(
            lambda protocol: f"127.0.0.1:{ports[protocol]}",
            "classify",
            len(ports),
            PER_S,
            TIMEOUT_S,
            lambda prediction: fault(prediction.labels[0].name),
            key,
            answered,
        ),
    ]


def peak_mb(pid: int) -> int:
    """Return the most memory that the gateway of a server has had, in MB."""
    (gateway,) = [
        child.pid for child in psutil.Process(pid).children(recursive=True) if "gateway" in child.cmdline()
    ]
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{gateway}/status").read_text())
    return int(match[1]) // 1000 if match else 0


class Outcome(NamedTuple):
    """What the steady clients saw; `peak_mb` is that of the gateway since its start."""

    statuses: Counter[str]
    failed: int
    answered_ms: list[float]
    peak_mb: int


def measured(front: Front, key: str, pid: int, count: int, seconds: float) -> Outcome:
    """Return what the steady clients saw while attackers were at work."""
    answered: list[Span] = []
    with attackers(front, count) as statuses, Traffic(clients(front, key, answered)) as traffic:
        time.sleep(WARM_UP_S)
        answered.clear()
        time.sleep(seconds)
    for text in traffic.faults():
        print(text)
    answered_ms = [(end_s - begin_s) * 1e3 for begin_s, end_s in answered]
    return Outcome(statuses, len(traffic.faults()), answered_ms, peak_mb(pid))


def summed(count: int, outcomes: Sequence[Outcome]) -> record.Row:
    """Return the row of all rounds with so many attackers."""
    statuses = sum((outcome.statuses for outcome in outcomes), Counter[str]())
    ordered_ms = sorted(latency_ms for one in outcomes for latency_ms in one.answered_ms)
    failed = sum(outcome.failed for outcome in outcomes)
    p50_ms, p99_ms = (round(percentile(ordered_ms, percent), 1) for percent in (50, 99))
    # Without attackers, only the first round is one of a gateway that has seen none.
    peak = outcomes[-1 if count else 0].peak_mb
    values = count, statuses.total(), len(ordered_ms) + failed, failed, p50_ms, p99_ms, peak
    return {**dict(zip(FIELDS, values, strict=True)), "statuses": dict(sorted(statuses.items()))}


def main() -> int:
    """Measure, print and record."""
    args = record.parsed(record.parser(__doc__ or "", rounds=3, seconds=60.0, cases=20_000, seed=1))
    outcomes: dict[int, list[Outcome]] = {0: [], ATTACKERS: []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        keys = folder / "keys.json"
        secret, steady = (key_changes.add(keys, name, ["infer"], None) for name in ("attacker", "steady"))
        words = ("--guard", "--keys", str(keys))
        with servers.supervised(REPOSITORY, folder, os.environ, words) as running:
            ports = running.server_info.ports
            front = Front(ports.http, ports.grpc, secret)
            for _ in range(args.rounds):
                for count, rounds in outcomes.items():
                    rounds.append(measured(front, steady, running.pid, count, args.seconds))
            pids = [process.pid for process in resource_usage.tree(running.pid)]
            fuzz_outcome = uvloop.run(fuzz(front, pids, args.cases, args.seed))
    rows = [summed(*item) for item in outcomes.items()]
    print(record.table(COLUMNS, rows))
    print(*(f"{status}: {number}" for status, number in sorted(fuzz_outcome.statuses.items())), sep="\n")
    print(*(f"wrong status {status}: {case}" for status, case in fuzz_outcome.wrong), sep="\n")
    ratio = round(rows[1]["p99 ms"] / rows[0]["p99 ms"], 2)
    peak = rows[1][FIELDS[-1]]
    problems = {
        "the steady clients had failed requests": rows[1]["failed"],
        f"the gateway took {peak} MB, at most {MAX_GATEWAY_MB} expected": peak > MAX_GATEWAY_MB,
        f"p99 x {ratio}, at most {MAX_P99_RATIO:g} expected": ratio > MAX_P99_RATIO,
        "random requests got wrong statuses": fuzz_outcome.wrong,
    }
    missed = [text for text, is_so in problems.items() if is_so]
    statuses = dict(sorted(fuzz_outcome.statuses.items()))
    fuzzed = {"seed": args.seed, "cases": args.cases, "wrong": len(fuzz_outcome.wrong), "statuses": statuses}
    return record.finish(args.record, {"steady": rows, "p99_ratio": ratio, "fuzz": fuzzed}, missed)


if __name__ == "__main__":
    record.end(main)

"""Attack a guarded server while steady clients use it, then send random changes of requests.

One caller with a key of its own sends all known attacks in a loop, on several connections, together with
images of 64 megapixels. The steady clients have another key: one uses REST, one Triton's HTTP, one its gRPC.
Their answers are compared with the right one. Attackers are processes of their own.

    python -m loadtest.attack [--seconds 60] [--cases 20000]
"""

import os
import re
import tempfile
import time
from contextlib import closing
from http import HTTPStatus
from pathlib import Path

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
        each.pid for each in psutil.Process(pid).children(recursive=True) if "gateway" in each.cmdline()
    ]
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{gateway}/status").read_text())
    return int(found[1]) // 1000 if found else 0


def measured(front: Front, key: str, pid: int, count: int, seconds: float) -> record.Row:
    """Return what the steady clients saw while attackers were at work."""
    answered: list[Span] = []
    with attackers(front, count) as statuses, Traffic(clients(front, key, answered)) as traffic:
        time.sleep(WARM_UP_S)
        answered.clear()
        time.sleep(seconds)
    for text in traffic.faults():
        print(text)
    failed = len(traffic.faults())
    ordered_ms = sorted((end_s - begin_s) * 1e3 for begin_s, end_s in answered)
    p50_ms, p99_ms = (round(percentile(ordered_ms, percent), 1) for percent in (50, 99))
    values = count, statuses.total(), len(answered) + failed, failed, p50_ms, p99_ms, peak_mb(pid)
    return {**dict(zip(FIELDS, values, strict=True)), "statuses": dict(sorted(statuses.items()))}


def main() -> int:
    """Measure, print and record."""
    args = record.parsed(record.parser(__doc__ or "", seconds=60.0, cases=20_000, seed=1))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        keys = folder / "keys.json"
        secret, steady = (key_changes.add(keys, name, ["infer"], None) for name in ("attacker", "steady"))
        words = ("--guard", "--keys", str(keys))
        with servers.supervised(REPOSITORY, folder, os.environ, words) as running:
            ports = running.record.ports
            front = Front(ports.http, ports.grpc, secret)
            rows = [measured(front, steady, running.pid, count, args.seconds) for count in (0, ATTACKERS)]
            pids = [each.pid for each in resource_usage.tree(running.pid)]
            outcome = uvloop.run(fuzz(front, pids, args.cases, args.seed))
    print(record.table(COLUMNS, rows))
    print(*(f"{status}: {number}" for status, number in sorted(outcome.statuses.items())), sep="\n")
    print(*(f"wrong status {status}: {case}" for status, case in outcome.wrong), sep="\n")
    ratio = round(rows[1]["p99 ms"] / rows[0]["p99 ms"], 2)
    peak = rows[1][FIELDS[-1]]
    problems = {
        "the steady clients had failed requests": rows[1]["failed"],
        f"the gateway took {peak} MB, at most {MAX_GATEWAY_MB} expected": peak > MAX_GATEWAY_MB,
        f"p99 x {ratio}, at most {MAX_P99_RATIO:g} expected": ratio > MAX_P99_RATIO,
        "random requests got wrong statuses": outcome.wrong,
    }
    missed = [text for text, is_so in problems.items() if is_so]
    statuses = dict(sorted(outcome.statuses.items()))
    fuzzed = {"seed": args.seed, "cases": args.cases, "wrong": len(outcome.wrong), "statuses": statuses}
    return record.finish(args.record, {"steady": rows, "p99_ratio": ratio, "fuzz": fuzzed}, missed)


if __name__ == "__main__":
    record.end(main)

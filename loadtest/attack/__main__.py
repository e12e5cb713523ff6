"""Attack a guarded server while steady clients use it, then send random changes of requests.

One caller with a key of its own sends all known attacks in a loop, on several connections, together with
images of 64 megapixels. The steady clients have another key: one uses REST, one Triton's HTTP, one its gRPC.
Their answers are compared with the right one. Attackers are processes of their own.

    python -m loadtest.attack [--seconds 60] [--cases 20000]
"""

import contextlib
import http.client
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import uvloop

from loadtest import record, resource_usage, servers
from loadtest.attack.attackers import attackers
from loadtest.attack.attacks import Front
from loadtest.attack.fuzz import fuzz
from loadtest.torture.traffic import Kind, Span, Target, Traffic, classifiers
from nereid.assets import COFFEE, REPOSITORY
from nereid.gateway.admission import key_changes
from nereid.tune.load_generator import percentile

ATTACKERS, PER_S, WARM_UP_S = 4, 4.0, 2.0
TIMEOUT_S = 30.0
MAX_P99_RATIO, MAX_GATEWAY_MB = 3.0, 400
HEADINGS = ("attackers", "attacks", "requests", "failed", "p50 ms", "p99 ms", "gateway's peak MB")
RIGHT = "espresso"


def clients(front: Front, key: str, answered: list[Span]) -> list[Kind]:
    """Return a client for each protocol; `answered` gets begin and end of each request with an answer."""
    ports, photo = {"http": front.http_port, "grpc": front.grpc_port}, COFFEE.read_bytes()

    @contextlib.contextmanager
    def opened(_: Target) -> Iterator[http.client.HTTPConnection]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", ports["http"], TIMEOUT_S)) as rest:
            yield rest

    def send(rest: http.client.HTTPConnection) -> str:
        begin_s = time.monotonic()
        rest.request("POST", "/predict", photo, {"X-API-Key": key, "Content-Type": "image/jpeg"})
        response = rest.getresponse()
        body = response.read()
        if response.status != http.client.OK:
            raise ConnectionError(f"{response.status}: {body[:200]!r}")
        answered.append((begin_s, time.monotonic()))
        return fault(json.loads(body)["predictions"][0]["label"])

    def fault(label: str) -> str:
        return "" if label == RIGHT else f"expected {RIGHT}, got {label}"

    return [
        Kind("REST", PER_S, opened, send),
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
    return {**dict(zip(HEADINGS, values, strict=True)), "statuses": dict(sorted(statuses.items()))}


def markdown(rows: list[record.Row]) -> str:
    """Render the steady clients' rows as the table of docs/security.md."""
    return record.markdown(HEADINGS, [[each[name] for name in HEADINGS] for each in rows])


def main() -> int:
    """Measure, print and record."""
    parser = record.parser(__doc__ or "", seconds=60.0, cases=20_000, seed=1)
    args = record.parsed(parser)
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
    print(markdown(rows))
    print(*(f"{status}: {number}" for status, number in sorted(outcome.statuses.items())), sep="\n")
    print(*(f"wrong status {status}: {case}" for status, case in outcome.wrong), sep="\n")
    ratio = round(rows[1]["p99 ms"] / rows[0]["p99 ms"], 2)
    missed = [
        *(["the steady clients had failed requests"] if rows[1]["failed"] else []),
        *(
            [f"the gateway took {peak} MB, at most {MAX_GATEWAY_MB} expected"]
            if (peak := rows[1][HEADINGS[-1]]) > MAX_GATEWAY_MB
            else []
        ),
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

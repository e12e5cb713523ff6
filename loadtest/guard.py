"""The cost of a guarded server: the gateway in front of Triton's sockets, per request of the v2 protocol.

The same client uses the sockets and then the gateway, in blocks that alternate: one request at a time for the
latency, and several in flight for the throughput. Client, gateway and server share the machine.

    python -m loadtest.guard [--rounds 8] [--seconds 3] [--record guard]
"""

import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from itertools import repeat, takewhile
from pathlib import Path

import psutil

from loadtest import record, resource_usage, servers
from nereid import assets
from nereid.client.classifier import Classifier
from nereid.client.request import DEFAULT_PORTS, ProtocolName
from nereid.server.run_dir import ServerRecord

# A variant of its own: the route's choice would add noise.
MODEL = "classify_v1"
CONCURRENCY, WARM_UP = 8, 20
DIRECT, GUARDED = "socket", "gateway"
MAX_COST_MS: dict[ProtocolName, float] = {"http": 0.3, "grpc": 0.8}
HEADINGS = ("protocol", "p50 ms alone", "through the gateway", "cost ms", "CPU ms", "throughput of 8")

Series = dict[tuple[ProtocolName, str, str], list[float]]


def gateway_pid(server_pid: int) -> int:
    """Return the process of a guarded server's gateway."""
    (found,) = (each for each in psutil.Process(server_pid).children() if "gateway" in each.cmdline())
    return int(found.pid)


def address(running: ServerRecord, protocol: ProtocolName, path: str) -> str:
    """Return the address of Triton's socket or of the gateway."""
    return running.url(protocol) if path == DIRECT else f"{running.host}:{getattr(running.ports, protocol)}"


def alone_ms(classifier: Classifier, photo: bytes, seconds: float) -> list[float]:
    """Return the durations of requests that are sent one after the other."""
    durations, end_s = [], time.monotonic() + seconds
    while (begin_s := time.monotonic()) < end_s:
        classifier.classify(photo, top_k=1)
        durations.append((time.monotonic() - begin_s) * 1e3)
    return durations


def rate(classifier: Classifier, photo: bytes, seconds: float) -> float:
    """Return the correct responses per second with several requests in flight."""
    begin_s = time.monotonic()
    photos = takewhile(lambda _: time.monotonic() < begin_s + seconds, repeat(photo))
    answered = sum(not isinstance(each, Exception) for each in classifier.classify_many(photos, top_k=1))
    return answered / (time.monotonic() - begin_s)


def measure_round(running: ServerRecord, pid: int, photo: bytes, seconds: float, series: Series) -> None:
    """Add one round of all paths to the series."""
    for protocol in DEFAULT_PORTS:
        for path in (DIRECT, GUARDED):
            with ExitStack() as stack:
                url = address(running, protocol, path)
                classifier = stack.enter_context(Classifier(url, protocol, MODEL, concurrency=CONCURRENCY))
                for _ in range(WARM_UP):
                    classifier.classify(photo)
                began_s = resource_usage.cpu_s(pid)
                durations = alone_ms(classifier, photo, seconds)
                cpu_ms = (resource_usage.cpu_s(pid) - began_s) * 1e3 / len(durations)
                series[protocol, path, "ms"].append(statistics.median(durations))
                series[protocol, path, "cpu_ms"].append(cpu_ms)
                series[protocol, path, "rate"].append(rate(classifier, photo, seconds))


def summarise(series: Series) -> list[record.Row]:
    """Return a row per protocol: medians over the rounds, of differences and ratios within a round."""
    rows = []
    for protocol in DEFAULT_PORTS:
        direct, guarded = (series[protocol, path, "ms"] for path in (DIRECT, GUARDED))
        before, after = (series[protocol, path, "rate"] for path in (DIRECT, GUARDED))
        costs = [slow - fast for fast, slow in zip(direct, guarded, strict=True)]
        rows.append(
            {
                "protocol": protocol,
                "direct_ms": round(statistics.median(direct), 2),
                "guarded_ms": round(statistics.median(guarded), 2),
                "cost_ms": round(statistics.median(costs), 2),
                "cpu_ms": round(statistics.median(series[protocol, GUARDED, "cpu_ms"]), 2),
                "rate_ratio": record.median_ratio(after, before),
            }
        )
    return rows


def missed(rows: list[record.Row]) -> list[str]:
    """Return the missed targets."""
    return [
        f"{row['protocol']}: {row['cost_ms']} ms, at most {limit} expected"
        for row in rows
        if row["cost_ms"] > (limit := MAX_COST_MS[row["protocol"]])
    ]


def markdown(rows: list[record.Row]) -> str:
    """Render the rows as the table of docs/gateway.md."""
    return record.markdown(HEADINGS, [list(row.values()) for row in rows])


def main() -> int:
    """Measure, print and record; exit status 1 if a target is missed."""
    args = record.parsed(record.parser(__doc__ or "", rounds=8, seconds=3.0))
    series: Series = defaultdict(list)
    photo = assets.COFFEE.read_bytes()
    with (
        tempfile.TemporaryDirectory() as scratch,
        servers.supervised(assets.REPOSITORY, Path(scratch), os.environ, ("--guard",)) as running,
    ):
        pid = gateway_pid(running.pid)
        for _ in range(args.rounds):
            measure_round(running.record, pid, photo, args.seconds, series)
    rows = summarise(series)
    print(markdown(rows))
    return record.finish(args.record, {"rounds": args.rounds, "rows": rows}, missed(rows))


if __name__ == "__main__":
    record.end(main)

"""Thousands of connections that stay open: their memory, and the latency of requests on them.

python -m loadtest.connections [--rounds 3] [--record connections]

Every connection sends a health request, stays idle for a while, and sends more of them while others do. The
same number of requests in flight on few connections is the base.
"""

import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from loadtest import record, resource_usage, servers
from nereid.http_connection import HttpConnection
from nereid.tune.load_generator import percentile

TRITON, GATEWAY = "Triton", "gateway"
HEADINGS = ("server", "connections", "refused", "kB each", "p50 ms", "p99 ms", "failed")
IN_FLIGHT, FEW = 64, 64
COUNTS = (FEW, 2000, 8000)
# Requests of each round, on any number of connections.
REQUESTS = 16_000
IDLE_S = 5.0
# Files of this process for other purposes than connections.
OTHER_FILES = 100
OK = 200

Series = dict[tuple[str, int, str], list[float]]


def request(port: int) -> bytes:
    """Return a health request."""
    return f"GET /v2/health/live HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode()


async def opened(port: int, count: int) -> list[HttpConnection]:
    """Open connections that have had a response; those that the server refuses are missing."""
    places, message = asyncio.Semaphore(IN_FLIGHT), request(port)

    async def opened_one() -> HttpConnection | None:
        async with places:
            try:
                connection = await HttpConnection.open(f"127.0.0.1:{port}")
                response = await connection.send([message])
            except OSError:
                return None
            return connection if response.status == OK else None

    found = await asyncio.gather(*(opened_one() for _ in range(count)))
    return [each for each in found if each]


async def send_all(port: int, connections: list[HttpConnection]) -> tuple[list[float], int]:
    """Send REQUESTS on all connections in turn, IN_FLIGHT at a time; returns seconds, and failures."""
    message, taken_s, failures = request(port), list[float](), 0
    turns = iter(range(REQUESTS))

    async def send_on(first: int) -> None:
        """Send on every IN_FLIGHT-th connection, so that no two requests meet on one."""
        nonlocal failures
        own = connections[first::IN_FLIGHT]
        while own and next(turns, None) is not None:
            connection = own.pop(0)
            begin_s = time.perf_counter()
            try:
                response = await connection.send([message])
            except (OSError, AssertionError):
                failures += 1
                continue
            failures += response.status != OK
            taken_s.append(time.perf_counter() - begin_s)
            own.append(connection)

    await asyncio.gather(*(send_on(first) for first in range(IN_FLIGHT)))
    return taken_s, failures


async def observe(port: int, pid: int, count: int) -> dict[str, float]:
    """Return the numbers of one server with some connections."""
    before = resource_usage.memory_bytes(pid)
    connections = await opened(port, count)
    await asyncio.sleep(IDLE_S)
    grown = resource_usage.memory_bytes(pid) - before
    taken_s, failures = await send_all(port, connections)
    for each in connections:
        each.close()
    await asyncio.sleep(1)
    taken_ms = sorted(each * 1e3 for each in taken_s)
    return {
        "refused": count - len(connections),
        "kilobytes": grown / count / 1e3,
        "p50_ms": percentile(taken_ms, 50),
        "p99_ms": percentile(taken_ms, 99),
        "failed": failures,
    }


def summarise(series: Series) -> list[record.Row]:
    """Return a row per server and number of connections: medians, and the sums of failures."""
    rows: dict[tuple[str, int], record.Row] = {}
    for (server, count, name), values in series.items():
        row = rows.setdefault((server, count), {"server": server, "connections": count})
        is_sum = name in ("refused", "failed")
        row[name] = sum(values) if is_sum else round(statistics.median(values), 2)
    return list(rows.values())


def markdown(rows: Iterable[record.Row]) -> str:
    """Render the rows as a table of docs/capacity.md."""
    return record.markdown(HEADINGS, map(_cells, rows))


def _cells(row: record.Row) -> list[object]:
    return [row["server"], row["connections"], row["refused"], *_measured(row), row["failed"]]


def _measured(row: record.Row) -> Iterator[object]:
    # The growth with few connections is noise.
    yield row["kilobytes"] if row["connections"] > FEW else ""
    yield row["p50_ms"]
    yield row["p99_ms"]


def missed(rows: Iterable[record.Row]) -> list[str]:
    """Return the refused connections and the failed requests."""
    return [
        f"{row['server']}, {row['connections']} connections: {row['refused']} refused, {row['failed']} failed"
        for row in rows
        if row["refused"] or row["failed"]
    ]


def _measure(number: int, count: int, series: Series) -> None:
    """Measure a new server and a new gateway, which have no memory of earlier connections to use again."""
    with tempfile.TemporaryDirectory() as scratch, servers.served(Path(scratch), os.environ) as server:
        port = server.options.ports.http
        with servers.gateway(port) as front:
            measured = {TRITON: (port, server.pid), GATEWAY: (front.port, front.pid)}
            for name, where in record.turns(measured.items(), number):
                for key, value in asyncio.run(observe(*where, count)).items():
                    series[name, count, key].append(value)


def main() -> int:
    """Measure, print and record; exit status 1 if a connection was refused or a request failed."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = max(COUNTS) + OTHER_FILES
    problem = "" if limit >= wanted else f"needs {wanted} open files, got {limit}; fix: ulimit -n {wanted}"
    args = record.parsed(record.parser(__doc__, rounds=3), problem)
    series: Series = defaultdict(list)
    for number in range(args.rounds):
        for count in COUNTS:
            _measure(number, count, series)
        print(f"round {number + 1} of {args.rounds} measured", file=sys.stderr)
    rows = summarise(series)
    print(markdown(rows))
    result = {"rounds": args.rounds, "in_flight": IN_FLIGHT, "requests": REQUESTS, "rows": rows}
    return record.finish(args.record, result, missed(rows))


if __name__ == "__main__":
    record.end(main)

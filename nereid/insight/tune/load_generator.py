"""HTTP load from asyncio, in a closed loop.

`run` starts the closed loop in a process of its own, so that the caller's work does not disturb it.
"""

import asyncio
import http.client
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

HOST = "127.0.0.1"
# Every connection has sent requests for this long before the measurement begins.
WARM_UP_S = 0.2
# Requests that are in flight at the end fail after this long.
DRAIN_TIMEOUT_S = 20.0
# Time for a process to start on a busy machine.
START_TIMEOUT_S = 30.0
# The status of a request without a response.
NO_RESPONSE = 0


class LoadFailed(SystemExit):
    """Requests failed, or none succeeded, so no number is valid; a script ends with the message."""


class Response(NamedTuple):
    """One request: its start, its end, and its HTTP status.

    Times are in seconds of the monotonic clock. The status is `NO_RESPONSE` without a response.
    """

    started_at: float
    ended_at: float
    status: int


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The result of one run of any load generator: successful responses per second, and their latencies.

    `answered` counts the successful responses and `failed` all others, if the generator reports them.
    """

    rate: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    answered: int = 0
    failed: int = 0


def run(
    port: int, requests: Sequence[Path], concurrencies: Sequence[int], seconds: float
) -> dict[int, LoadResult]:
    """Load a server at each concurrency in turn, from another process.

    Args:
        port: port of the server on this machine.
        requests: files with a complete HTTP/1.1 request each; connections take them in turn.
        concurrencies: numbers of connections.
        seconds: length of the measurement at each concurrency.

    Raises:
        subprocess.SubprocessError: the process failed, or did not end.
    """
    order = json.dumps([port, [*map(str, requests)], [*concurrencies], seconds])
    limit_s = START_TIMEOUT_S + len(concurrencies) * (WARM_UP_S + seconds + DRAIN_TIMEOUT_S)
    command = [sys.executable, "-P", "-m", __name__]
    done = subprocess.run(
        command, input=order, stdout=subprocess.PIPE, text=True, check=True, timeout=limit_s
    )
    return {int(number): LoadResult(**load) for number, load in json.loads(done.stdout).items()}


def closed_loop(
    host: str, port: int, requests: Sequence[bytes], concurrency: int, seconds: float
) -> LoadResult:
    """Keep `concurrency` requests in flight for a number of seconds, each on its own connection.

    Requests in flight at the end are awaited, so that the next load does not queue behind them. They count
    only if no response came before.
    """
    # Imported here: a process that only starts `run` needs neither uvloop nor httptools.
    import uvloop

    from nereid.base.http_connection import HttpConnection

    # The clock of uvloop counts whole milliseconds only, so times come from `time.monotonic`.
    async def load() -> LoadResult:
        responses, source = list[Response](), itertools.cycle(requests)
        starts_at = time.monotonic() + WARM_UP_S
        ends_at = starts_at + seconds

        async def send_repeatedly() -> None:
            while time.monotonic() < ends_at:
                connection, is_usable = await HttpConnection.open(f"{host}:{port}"), True
                try:
                    while is_usable and time.monotonic() < ends_at:
                        started_at = time.monotonic()
                        try:
                            status = (await connection.send([next(source)])).status
                            is_usable = connection.is_open
                        except (OSError, http.client.HTTPException):
                            status, is_usable = NO_RESPONSE, False
                        responses.append(Response(started_at, time.monotonic(), status))
                finally:
                    connection.close()

        callers = [asyncio.create_task(send_repeatedly()) for _ in range(concurrency)]
        _, late = await asyncio.wait(callers, timeout=WARM_UP_S + seconds + DRAIN_TIMEOUT_S)
        for caller in late:
            caller.cancel()
        ended = await asyncio.gather(*callers, return_exceptions=True)
        lost = sum(isinstance(outcome, BaseException) for outcome in ended)  # includes the cancelled callers
        return within(responses, starts_at, ends_at, time.monotonic(), lost)

    return uvloop.run(load())


def within(
    responses: Sequence[Response], starts_at: float, ends_at: float, now_s: float, lost: int = 0
) -> LoadResult:
    """Sum up the responses from after the first one of a span to the first one after it, or all if none.

    Responses of a batch end together. A fixed span would hold one batch more or less by chance, which is
    over a tenth of half a second. Failures outside the span also count.
    """
    ends = sorted(response.ended_at for response in responses)
    first = next((end for end in ends if end >= starts_at), now_s)
    last = next((end for end in ends if end >= ends_at), max(ends, default=now_s))
    between = [response for response in responses if first < response.ended_at <= last]
    if not between:
        return summary(responses, now_s - starts_at + WARM_UP_S, lost)
    outside = (response for response in responses if not first < response.ended_at <= last)
    failed = sum(response.status != HTTPStatus.OK for response in outside)
    return summary(between, last - first, lost + failed)


def summary(responses: Sequence[Response], seconds: float, lost: int = 0) -> LoadResult:
    """Sum up responses; only successful ones have a latency."""
    ordered_ms = sorted(
        (response.ended_at - response.started_at) * 1e3
        for response in responses
        if response.status == HTTPStatus.OK
    )
    failed = len(responses) - len(ordered_ms) + lost
    if not ordered_ms:
        return LoadResult(0.0, 0.0, 0.0, 0.0, 0, failed)
    p50, p90, p99 = (percentile(ordered_ms, percent) for percent in (50, 90, 99))
    return LoadResult(len(ordered_ms) / seconds, p50, p90, p99, len(ordered_ms), failed)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest of some ascending values that `percent` per cent of them do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def post_request(host: str, port: int, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Return a complete HTTP/1.1 request."""
    lines = {"Host": f"{host}:{port}", "Content-Length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def main() -> None:
    """Load a server as `run` says on stdin, and print the results as JSON."""
    port, paths, concurrencies, seconds = json.load(sys.stdin)
    requests = [Path(path).read_bytes() for path in paths]
    loads = {number: asdict(closed_loop(HOST, port, requests, number, seconds)) for number in concurrencies}
    print(json.dumps(loads))


if __name__ == "__main__":
    main()

"""Saturating load over HTTP: so many callers that each ask again as soon as they are answered.

A process of its own, so that nothing else that measures or decides disturbs it; `run` starts one.

    python -m nereid.tune.closed_loop PORT REQUEST… [--concurrency 1 32] [--seconds 2]

A REQUEST is a file with a whole HTTP/1.1 request; callers take them in turn.
"""

import argparse
import asyncio
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TypeAlias

HOST = "127.0.0.1"
# So long every caller has asked before what is measured begins.
WARM_S = 0.2
# How long what is under way at the end is waited for; what takes longer has failed.
DRAIN_S = 20.0
# What a process takes to start, and a busy machine to let it.
START_S = 30.0

# When a request began and ended, in seconds, and the status of its answer.
Seen: TypeAlias = tuple[float, float, int]


class LoadFailed(SystemExit):
    """Requests failed, or none was answered, so no number means anything; a script ends with that."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one run of load saw, by whichever generator: good answers per second, and their latencies.

    `answered` counts them, and `failed` all others, where the generator tells.
    """

    rate: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    answered: int = 0
    failed: int = 0


def run(port: int, requests: Sequence[Path], concurrencies: Sequence[int], seconds: float) -> dict[int, Load]:
    """Ask for so many seconds at each concurrency in turn, from another process.

    Raises:
        subprocess.SubprocessError: it failed, or did not end.
    """
    words = [sys.executable, "-m", "nereid.tune.closed_loop", str(port), *map(str, requests)]
    words += ["--seconds", str(seconds), "--concurrency", *map(str, concurrencies)]
    most_s = START_S + len(concurrencies) * (WARM_S + seconds + DRAIN_S)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=most_s)
    return {int(number): Load(**load) for number, load in json.loads(done.stdout).items()}


def saturate(host: str, port: int, requests: Sequence[bytes], concurrency: int, seconds: float) -> Load:
    """Let `concurrency` callers ask for so many seconds, each on its own connection.

    What is under way at the end is waited for, so that the next load does not queue behind it; it counts
    only if there was no answer before.
    """
    # Here, so that whoever only starts a process of this needs none of the extra `load`.
    import uvloop

    from nereid.tune.connection import Connection

    # uvloop's own clock has whole milliseconds only.
    async def call(requests: Iterator[bytes], seen: list[Seen], end_s: float) -> None:
        while time.monotonic() < end_s:
            connection = await Connection.open(host, port)
            try:
                while connection.is_open and time.monotonic() < end_s:
                    begin_s = time.monotonic()
                    status = await connection.ask(next(requests))
                    seen.append((begin_s, time.monotonic(), status))
            finally:
                connection.close()

    async def load() -> Load:
        loop, seen = asyncio.get_running_loop(), list[Seen]()
        begin_s, source = time.monotonic() + WARM_S, itertools.cycle(requests)
        end_s = begin_s + seconds
        callers = [loop.create_task(call(source, seen, end_s)) for _ in range(concurrency)]
        _, late = await asyncio.wait(callers, timeout=WARM_S + seconds + DRAIN_S)
        for each in late:
            each.cancel()
        ended = await asyncio.gather(*callers, return_exceptions=True)
        lost = sum(isinstance(each, BaseException) for each in ended)  # the late ones among them
        return within(seen, begin_s, end_s, time.monotonic(), lost)

    return uvloop.run(load())


def within(seen: Sequence[Seen], begin_s: float, end_s: float, now_s: float, lost: int = 0) -> Load:
    """Sum up what ended after the first answer of a span, up to the first after it; all, if that is nothing.

    Those of a batch end at once: a span of the clock alone holds a batch more or less by chance, in half a
    second a tenth of all and more. What failed counts whenever it did.
    """
    ends = sorted(end for _, end, _ in seen)
    first = next((end for end in ends if end >= begin_s), now_s)
    last = next((end for end in ends if end >= end_s), max(ends, default=now_s))
    between = [each for each in seen if first < each[1] <= last]
    if not between:
        return summary(seen, now_s - begin_s + WARM_S, lost)
    failed = sum(status != HTTPStatus.OK for _, end, status in seen if not first < end <= last)
    return summary(between, last - first, lost + failed)


def summary(seen: Sequence[Seen], seconds: float, lost: int = 0) -> Load:
    """Sum requests up; only good answers have a latency."""
    good_ms = sorted((end - begin) * 1e3 for begin, end, status in seen if status == HTTPStatus.OK)
    failed = len(seen) - len(good_ms) + lost
    if not good_ms:
        return Load(0.0, 0.0, 0.0, 0.0, 0, failed)
    p50, p90, p99 = (percentile(good_ms, percent) for percent in (50, 90, 99))
    return Load(len(good_ms) / seconds, p50, p90, p99, len(good_ms), failed)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest value that so many per cent of all do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def main() -> None:
    """Ask, and print what came of it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("port", type=int)
    parser.add_argument("requests", type=Path, nargs="+")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32])
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    requests = [path.read_bytes() for path in args.requests]
    loads = {number: saturate(HOST, args.port, requests, number, args.seconds) for number in args.concurrency}
    print(json.dumps({number: asdict(load) for number, load in loads.items()}))


if __name__ == "__main__":
    main()

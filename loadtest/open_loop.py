"""Requests at times that do not depend on the answers, so that a stall is not hidden by waiting for it.

Latency counts from when a request was to be sent. Connections are kept and reused; when all are busy another
is opened, up to a bound, and what waits for one waits on the clock.
"""

import asyncio
import random
from collections import deque
from dataclasses import dataclass
from itertools import takewhile

import uvloop

from loadtest.users.arrivals import offsets
from nereid.tune.connection import LOST, Connection

MOST_CONNECTIONS = 1_000
# After the last request is sent, what is still open counts as lost.
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request: when it was to be sent, how long it took, and its status or `LOST`."""

    intended_s: float
    latency_s: float
    status: int


class _Load:
    def __init__(self, host: str, port: int, request: bytes) -> None:
        self.replies: list[Reply] = []
        self._address = host, port
        self._request = request
        self._idle: deque[Connection] = deque()
        self._free = asyncio.Semaphore(MOST_CONNECTIONS)

    async def send(self, intended_s: float) -> None:
        loop = asyncio.get_running_loop()
        status = LOST
        try:
            async with self._free:
                connection = await self._connect()
                status = await connection.ask(self._request)
                if connection.is_open:
                    self._idle.append(connection)
        except OSError:
            pass
        finally:
            self.replies.append(Reply(intended_s, loop.time() - intended_s, status))

    async def _connect(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return await Connection.open(*self._address)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


def run(host: str, port: int, request: bytes, rate_per_s: float, seconds: float, seed: int) -> list[Reply]:
    """Send `request` at the times of a Poisson process, for so long; returns what became of each.

    Args:
        host, port: where to.
        request: a whole HTTP/1.1 request.
        rate_per_s: how many are sent on average.
        seconds: for how long.
        seed: of the times.
    """
    schedule = takewhile(lambda at_s: at_s < seconds, offsets(rate_per_s, "poisson", random.Random(seed)))

    async def load() -> list[Reply]:
        loop, target = asyncio.get_running_loop(), _Load(host, port, request)
        begin_s, sent = loop.time(), set[asyncio.Task[None]]()
        for offset_s in schedule:
            due_s = begin_s + offset_s
            if (pause_s := due_s - loop.time()) > 0:
                await asyncio.sleep(pause_s)
            sent.add(task := loop.create_task(target.send(due_s)))
            task.add_done_callback(sent.discard)
        if sent:
            _, open_still = await asyncio.wait(sent, timeout=PATIENCE_S)
            for task in open_still:
                task.cancel()
            await asyncio.gather(*open_still, return_exceptions=True)
        target.close()
        return target.replies

    return uvloop.run(load())

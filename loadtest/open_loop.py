"""Requests at times that do not depend on the answers, so that a stall is not hidden by waiting for it.

Latency counts from when a request was to be sent. Connections are kept and reused; when all are busy another
is opened, up to a bound, and what waits for one waits on the clock.
"""

import asyncio
import random
from collections import deque
from dataclasses import dataclass
from typing import cast

import httptools
import uvloop

MOST_CONNECTIONS = 1_000
# After the last request is sent, what is still open counts as lost.
PATIENCE_S = 30.0
LOST = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of one request: when it was to be sent, how long it took, and its status or `LOST`."""

    intended_s: float
    latency_s: float
    status: int


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection: a request at a time, its answer's status to whoever waits."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[int] | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive() and self._transport:
            self._transport.close()
        if self._answered and not self._answered.done():
            self._answered.set_result(self._parser.get_status_code())

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._answered and not self._answered.done():
            self._answered.set_result(LOST)

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> int:
        """Send a whole request, and return the status of its answer."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answered

    def close(self) -> None:
        """Close it now."""
        if self._transport:
            self._transport.abort()


class _Load:
    def __init__(self, host: str, port: int, request: bytes) -> None:
        self.replies: list[Reply] = []
        self._address = host, port
        self._request = request
        self._idle: deque[_Connection] = deque()
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

    async def _connect(self) -> _Connection:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, *self._address)
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()


def post(host: str, port: int, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """Return a whole HTTP/1.1 request."""
    lines = {"Host": f"{host}:{port}", "Content-Length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def run(host: str, port: int, request: bytes, rate_per_s: float, seconds: float, seed: int) -> list[Reply]:
    """Send `request` at the times of a Poisson process, for so long; returns what became of each.

    Args:
        host, port: where to.
        request: a whole HTTP/1.1 request.
        rate_per_s: how many are sent on average.
        seconds: for how long.
        seed: of the times.
    """
    draw = random.Random(seed)

    async def load() -> list[Reply]:
        loop, target = asyncio.get_running_loop(), _Load(host, port, request)
        next_s = loop.time()
        end_s, sent = next_s + seconds, set[asyncio.Task[None]]()
        while (next_s := next_s + draw.expovariate(rate_per_s)) < end_s:
            if (pause_s := next_s - loop.time()) > 0:
                await asyncio.sleep(pause_s)
            sent.add(task := loop.create_task(target.send(next_s)))
            task.add_done_callback(sent.discard)
        if sent:
            _, open_still = await asyncio.wait(sent, timeout=PATIENCE_S)
            for task in open_still:
                task.cancel()
            await asyncio.gather(*open_still, return_exceptions=True)
        target.close()
        return target.replies

    return uvloop.run(load())

"""The lean HTTP client, with servers that send whole, broken and unwanted responses."""

import asyncio
import contextlib
import http.client
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from nereid.base.http_connection import HttpConnectionPool, HttpResponse
from tests.tables import rows

T = TypeVar("T")
WATCHDOG_S = 30.0
GET = b"GET / HTTP/1.1\r\n\r\n"
ONE = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\none"
TWO = b"HTTP/1.1 404 Not Found\r\nX: y\r\nContent-Length: 3\r\n\r\ntwo"


def served(use: Callable[[HttpConnectionPool], Awaitable[T]], *pieces: bytes, stays=True, greeting=b"") -> T:
    """Use connections to a server that answers each request with these pieces, one after the other."""
    answering = set[asyncio.Task[None] | None]()

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())
        writer.write(greeting)
        with contextlib.suppress(ConnectionError):
            while await reader.read(2**16):
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(0.05)
                if not stays:
                    break
            writer.close()
            await writer.wait_closed()

    async def run() -> T:
        async with asyncio.timeout(WATCHDOG_S), await asyncio.start_server(respond, "127.0.0.1", 0) as server:
            connections = HttpConnectionPool(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            try:
                return await use(connections)
            finally:
                connections.close()
                await asyncio.gather(*filter(None, answering))

    return asyncio.run(run())


async def send(connections: HttpConnectionPool) -> HttpResponse:
    async with connections.acquire() as connection:
        return await connection.send([GET])


@rows(
    ([ONE], b"one"),
    ([ONE[:20], ONE[20:-1], ONE[-1:]], b"one"),
    ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\non\r\n1\r\ne\r\n0\r\n\r\n"], b"one"),
    ([b"HTTP/1.1 200 OK\r\n\r\non", b"e"], b"one"),
    ([b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\non", b"e"], b"one"),
    ([b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 3\r\n\r\none"], b"one"),
    ([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"], b""),
)
def test_body_is_complete(pieces, body):
    answer = served(send, *pieces, stays=False)

    assert (answer.status, answer.body) == (200, body)


@rows(
    (b"", ConnectionResetError), (ONE[:-1], ConnectionResetError), (b"no HTTP\r\n", http.client.BadStatusLine)
)
def test_broken_response_is_an_error(piece, error):
    with pytest.raises(error):
        served(send, piece, stays=False)


def test_peer_that_speaks_first_is_shown():
    """As a gRPC server does; its bytes may come before the request leaves."""

    async def late(connections: HttpConnectionPool) -> HttpResponse:
        async with connections.acquire() as connection:
            await asyncio.sleep(0.2)
            return await connection.send([GET])

    with pytest.raises(http.client.BadStatusLine, match="frames"):
        served(late, greeting=b"frames")


@pytest.mark.parametrize("pieces", [[ONE + TWO], [ONE, TWO], [ONE + TWO[:10]], [ONE, b"x"]])
def test_unwanted_response_is_nobodys(pieces):
    """It could be another caller's: the first response stays as it was, and the connection ends."""

    async def twice(connections: HttpConnectionPool) -> list[HttpResponse]:
        async with connections.acquire() as connection:
            first = await connection.send([GET])
            async with asyncio.timeout(WATCHDOG_S):
                while connection.is_open:
                    await asyncio.sleep(0.01)
        return [first, await send(connections)]

    for answer in served(twice, *pieces):
        assert answer == HttpResponse(200, {b"content-length": b"3"}, b"one")


def test_cancelled_request_leaves_its_response_to_nobody():
    async def twice(connections: HttpConnectionPool) -> HttpResponse:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await send(connections)
        return await send(connections)

    assert served(twice, b"", ONE).body == b"one"

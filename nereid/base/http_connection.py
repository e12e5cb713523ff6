"""HTTP/1.1 client connections with little overhead per request."""

import asyncio
import http.client
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import httptools

from nereid.base.addresses import unix_path

# Headers that delimit a body; without them, it ends when the connection closes.
_FRAMING = {b"content-length", b"transfer-encoding"}
# Bytes quoted in the error about a peer that does not speak HTTP.
MAX_LINE = 24


@dataclass(slots=True)
class HttpResponse:
    """A response: its status, headers by lower-case name, and body."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""


class HttpConnection(asyncio.Protocol):
    """One connection with at most one request in flight."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._pending_response: asyncio.Future[HttpResponse] | None = None
        self._response, self._pieces = HttpResponse(), list[bytes]()
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = False
        self._foreign = b""

    @classmethod
    async def open(cls, url: str) -> "HttpConnection":
        """Connect to a server at HOST:PORT or `unix:PATH`."""
        loop = asyncio.get_running_loop()
        if path := unix_path(url):
            return (await loop.create_unix_connection(cls, path))[1]
        host, _, port = url.rpartition(":")
        return (await loop.create_connection(cls, host.strip("[]"), int(port)))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse the next part of a response; close the connection on unexpected bytes."""
        if self._pending_response is None or self._pending_response.done():
            self._foreign = data
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._foreign = data
            self._fail(self._ended())
            self.close()

    def on_message_begin(self) -> None:
        """Start a response; close the connection if nobody awaits one. Called by the parser."""
        self._response, self._pieces, self._has_head = HttpResponse(), [], False
        if self._pending_response is None or self._pending_response.done():
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; called by the parser."""
        self._response.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Note that the body follows; called by the parser."""
        self._has_head = True

    def on_body(self, piece: bytes) -> None:
        """Keep a part of the body; called by the parser."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Report the response to the sender; called by the parser."""
        if not self._parser.should_keep_alive() and self._transport:
            self._transport.close()
        self._response.status = self._parser.get_status_code()
        self._response.body = b"".join(self._pieces)
        if self._pending_response and not self._pending_response.done():
            self._pending_response.set_result(self._response)

    def connection_lost(self, error: Exception | None) -> None:
        """Tell the sender that no response will arrive, or that the body is complete."""
        self._transport = None
        ends_body = self._has_head and error is None and not _FRAMING & self._response.headers.keys()
        if ends_body:
            self.on_message_complete()
        self._fail(self._ended())

    def _ended(self) -> Exception:
        """Return the error for a missing response; non-HTTP bytes show which protocol the peer speaks."""
        if self._foreign:
            return http.client.BadStatusLine(self._foreign[:MAX_LINE].decode("latin-1"))
        return ConnectionResetError("the connection ended before the response")

    def _fail(self, error: Exception) -> None:
        if self._pending_response and not self._pending_response.done():
            self._pending_response.set_exception(error)

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: Sequence[bytes | memoryview]) -> HttpResponse:
        """Send the parts of a complete request and return the response.

        Raises:
            ConnectionResetError: the connection closed before the response.
            BadStatusLine: the peer does not speak HTTP; the error contains its first bytes.
        """
        if self._transport is None:
            raise self._ended()
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = False
        self._pending_response = asyncio.get_running_loop().create_future()
        self._transport.writelines(request)
        try:
            return await self._pending_response
        finally:
            self._pending_response = None  # its error refers to this frame, and so to the request

    def close(self) -> None:
        """Close the connection immediately."""
        if self._transport:
            self._transport.abort()


class HttpConnectionPool:
    """Reusable connections to one server; a request opens a new one if none is free.

    Args:
        url: server address, HOST:PORT or `unix:PATH`.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._host = "localhost" if unix_path(url) else url
        self.idle: deque[HttpConnection] = deque()
        self.busy: set[HttpConnection] = set()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[HttpConnection]:
        """Yield a connection for one request; an error or cancellation closes it.

        Raises:
            OSError: the server cannot be reached.
        """
        while self.idle:
            if (connection := self.idle.pop()).is_open:
                break
        else:
            connection = await HttpConnection.open(self.url)
        self.busy.add(connection)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        finally:
            self.busy.discard(connection)
        if connection.is_open:
            self.idle.append(connection)

    async def request(
        self,
        method: str,
        path: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: Sequence[bytes | memoryview] = (),
        timeout_s: float | None = None,
    ) -> HttpResponse:
        """Send a request and return its response; cancelling the request closes its connection.

        Raises:
            OSError: there was no response; a TimeoutError without an errno means it did not arrive in time.
            HTTPException: the peer does not speak HTTP.
        """
        head = self.build_head(method, path, headers, sum(map(len, body)))
        async with asyncio.timeout(timeout_s), self.acquire() as connection:
            return await connection.send([head, *filter(len, body)])

    def close(self) -> None:
        """Close all connections; requests in flight fail."""
        for connection in (*self.idle, *self.busy):
            connection.close()
        self.idle.clear()

    def build_head(
        self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body_bytes: int
    ) -> bytes:
        """Return the head of a request whose body has the given length."""
        lines = [f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\n".encode()]
        lines += map(b"%b: %b\r\n".__mod__, headers)
        return b"".join([*lines, b"content-length: %d\r\n\r\n" % body_bytes])

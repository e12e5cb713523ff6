"""An HTTP/1.1 client connection with little work per request."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import httptools

from nereid.addresses import unix_path

# The status of a request without a response.
LOST = 0


@dataclass(slots=True)
class HttpResponse:
    """A response: its status, headers by lower-case name, and body."""

    status: int = LOST
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""


class HttpConnection(asyncio.Protocol):
    """One connection with at most one request in flight."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[HttpResponse] | None = None
        self._response, self._pieces = HttpResponse(), list[bytes]()
        self._parser = httptools.HttpResponseParser(self)

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
        """Parse the next part of a response; a damaged one ends the connection."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; called by the parser."""
        self._response.headers[name.lower()] = value

    def on_body(self, piece: bytes) -> None:
        """Keep a part of the body; called by the parser."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """Report the response to the sender; called by the parser."""
        if not self._parser.should_keep_alive() and self._transport:
            self._transport.close()
        self._response.status = self._parser.get_status_code()
        self._response.body = b"".join(self._pieces)
        self._report()

    def connection_lost(self, error: Exception | None) -> None:
        """Report to the sender that no response will come."""
        self._transport = None
        self._report()

    def _report(self) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_result(self._response)

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: Sequence[bytes | memoryview]) -> HttpResponse:
        """Send the parts of a complete request; return its response, with status `LOST` if none came."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._response, self._pieces = HttpResponse(), []
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.writelines(request)
        return await self._answer

    def close(self) -> None:
        """Close the connection immediately."""
        if self._transport:
            self._transport.abort()

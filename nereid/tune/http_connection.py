"""An HTTP/1.1 connection for the load generator, with little work per request."""

import asyncio
from typing import cast

import httptools

# The status of a request without a response.
LOST = 0


class HttpConnection(asyncio.Protocol):
    """One connection with at most one request in flight."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._status: asyncio.Future[int] | None = None
        self._parser = httptools.HttpResponseParser(self)

    @classmethod
    async def open(cls, host: str, port: int) -> "HttpConnection":
        """Connect to a server."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse the next part of a response."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Report the status to the sender; called by the parser."""
        if not self._parser.should_keep_alive() and self._transport:
            self._transport.close()
        if self._status and not self._status.done():
            self._status.set_result(self._parser.get_status_code())

    def connection_lost(self, error: Exception | None) -> None:
        """Report to the sender that no response will come."""
        self._transport = None
        if self._status and not self._status.done():
            self._status.set_result(LOST)

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def send(self, request: bytes) -> int:
        """Send a complete request; returns the status of its response."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._status = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._status

    def close(self) -> None:
        """Close the connection immediately."""
        if self._transport:
            self._transport.abort()

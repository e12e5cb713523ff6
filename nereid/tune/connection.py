"""One HTTP/1.1 connection of a load generator: a request at a time, with as little work as Python allows."""

import asyncio
from typing import cast

import httptools

# Status of a request that got no answer.
LOST = 0


class Connection(asyncio.Protocol):
    """A request at a time, its answer's status to whoever waits."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[int] | None = None
        self._parser = httptools.HttpResponseParser(self)

    @classmethod
    async def open(cls, host: str, port: int) -> "Connection":
        """Connect."""
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what is written to."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Read on in the answer."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """Hand the status on; called by the parser."""
        if not self._parser.should_keep_alive() and self._transport:
            self._transport.close()
        if self._answered and not self._answered.done():
            self._answered.set_result(self._parser.get_status_code())

    def connection_lost(self, error: Exception | None) -> None:
        """Tell whoever waits that there will be no answer."""
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


def post(host: str, port: int, path: str, body: bytes, headers: dict[str, str]) -> bytes:
    """Return a whole HTTP/1.1 request."""
    lines = {"Host": f"{host}:{port}", "Content-Length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body

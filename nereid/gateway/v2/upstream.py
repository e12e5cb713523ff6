"""HTTP connections from the gateway to Triton."""

import asyncio
from collections import deque
from collections.abc import Sequence

from nereid.gateway.failures import Failure
from nereid.http_connection import LOST, HttpConnection, HttpResponse

# A server on this machine, or in the same cluster, accepts immediately.
CONNECT_S = 5.0


class TritonHttp:
    """Connections that are reused; a request that finds none free opens another.

    Args:
        url: Triton's HTTP address, HOST:PORT or `unix:PATH`; "" if it is unknown.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.is_known = bool(url)
        self._idle: deque[HttpConnection] = deque()

    async def send(
        self,
        method: str,
        path: str,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: Sequence[bytes | memoryview] = (),
    ) -> HttpResponse:
        """Send a request, and return the response; a cancelled request ends its connection.

        Raises:
            Failure: `unreachable`, no response came.
        """
        lines = [f"{method} {path} HTTP/1.1\r\nhost: triton\r\n".encode()]
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(b"content-length: %d\r\n\r\n" % sum(map(len, body)))
        try:
            connection = await self._connect()
        except OSError as error:
            raise _unreachable() from error
        is_done = False
        try:
            response = await connection.send([b"".join(lines), *filter(len, body)])
            is_done = response.status != LOST
        finally:
            if is_done and connection.is_open:
                self._idle.append(connection)
            else:
                connection.close()
        if not is_done:
            raise _unreachable()
        return response

    async def _connect(self) -> HttpConnection:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        async with asyncio.timeout(CONNECT_S):
            return await HttpConnection.open(self._url)

    def close(self) -> None:
        """Close the connections that are free."""
        for connection in self._idle:
            connection.close()


def _unreachable() -> Failure:
    return Failure("unreachable", "the server behind the gateway cannot be reached", 1.0)

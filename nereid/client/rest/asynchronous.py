"""KServe v2 client over HTTP for asyncio.

It replaces the client of tritonclient, whose cost per request is several times higher.
"""

import http.client
from typing import Any

from nereid.base.http_connection import HttpConnections
from nereid.client.rest.methods import LENGTH, Request, RestMethods, failure_of, json_size_of

_LENGTH = LENGTH.lower().encode()


class AsyncRestClient(RestMethods):
    """The methods for the tasks of one event loop, which share the connections.

    All methods return awaitables, and also raise the errors of `HttpConnection`.

    Args:
        url: address of the server, HOST:PORT or `unix:PATH`.
    """

    def __init__(self, url: str) -> None:
        self._connections = HttpConnections(url)

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        self._connections.close()

    async def _send(self, request: Request) -> Any:
        lines = ((name.encode(), value.encode()) for name, value in request.headers.items())
        head = self._connections.head(
            request.method, f"/v2/{request.path}", lines, sum(map(len, request.body))
        )
        async with self._connections.taken() as connection:
            response = await connection.send([head, *filter(None, request.body)])
            if response.status == http.client.OK:
                # A malformed response, or another's, ends the connection.
                result = request.read(response.body, json_size_of(response.headers.get(_LENGTH)))
        if response.status != http.client.OK:
            raise failure_of(response.status, response.body)
        return result

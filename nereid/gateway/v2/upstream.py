"""HTTP connections from the gateway to Triton."""

import http.client
from collections.abc import Sequence

from nereid.client.classifier_errors import connection_hint
from nereid.gateway.failures import unreachable
from nereid.http_connection import HttpConnections, HttpResponse


class TritonHttp(HttpConnections):
    """Sends requests to Triton's HTTP port."""

    async def request(
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
        start = self.head(method, path, headers, sum(map(len, body)))
        try:
            async with self.taken() as connection:
                return await connection.send([start, *filter(len, body)])
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(connection_hint(str(error))) from error

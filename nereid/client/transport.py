"""Connections to a server: each RPC with a deadline, and one tree of errors for all failures."""

import asyncio
import http.client
import time
from collections.abc import Mapping
from typing import Any

import tritonclient.grpc
import tritonclient.grpc.aio

from nereid.client.classifier_errors import (
    ClassifierError,
    TimedOut,
    Unreachable,
    connection_hint,
    from_failure,
)
from nereid.client.request import CHANNEL, ProtocolName
from nereid.client.rest.asynchronous import AsyncRestClient
from nereid.client.rest.blocking import RestClient
from nereid.client.sans_io import Flow, Pause, Result
from nereid.contract import GRPC_PORT, HTTP_PORT

# Errors about a response that is not HTTP, or not JSON.
FOREIGN = (http.client.BadStatusLine, ValueError)
PORTS_HINT = f"the port; by default Triton has HTTP on {HTTP_PORT} and gRPC on {GRPC_PORT}"


Headers = Mapping[str, str]
NO_HEADERS: Headers = {}


class Connection:
    """Run the methods of tritonclient's clients; safe to use from several threads. The first RPC connects.

    Args:
        url: address of the server.
        protocol: `grpc` or `http`.
        headers: headers of each request, in addition to its own.
    """

    def __init__(self, url: str, protocol: ProtocolName, headers: Headers = NO_HEADERS) -> None:
        self._url, self._is_closed, self._headers = url, False, headers
        self._client: Any = RestClient(url)
        if protocol == "grpc":
            self._client = tritonclient.grpc.InferenceServerClient(url, channel_args=CHANNEL)

    def call(self, name: str, remaining_s: float, *args: Any, **options: Any) -> Any:
        """Run the method `name`, and return its result.

        Raises:
            ClassifierError: the method failed, or took longer than `remaining_s`.
            RuntimeError: the connection is closed.
        """
        try:
            more = _with_headers(options, self._headers)
            return getattr(self._client, name)(*args, client_timeout=remaining_s, **more)
        except Exception as error:
            raise _failure(self._url, error, remaining_s, self._is_closed) from None

    def close(self) -> None:
        """Close all sockets; RPCs in flight fail."""
        self._is_closed = True
        self._client.close()


def run(connection: Connection, flow: Flow[Result]) -> Result:
    """Run a flow with blocking I/O; return its result, or raise its error."""
    result: Any = None
    error: ClassifierError | None = None
    try:
        while True:
            step = flow.throw(error) if error else flow.send(result)
            result = error = None
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                continue
            try:
                result = connection.call(step.name, step.timeout_s, *step.args, **step.options)
            except ClassifierError as failed:
                error = failed
    except StopIteration as done:
        value: Result = done.value
        return value
    finally:
        flow.close()  # immediately, also after a signal
        del error  # it refers to this frame: the cycle would keep the images until the collector runs


class AsyncConnection:
    """`Connection` for asyncio; over gRPC a cancelled task cancels its request on the server, too."""

    def __init__(self, url: str, protocol: ProtocolName, headers: Headers = NO_HEADERS) -> None:
        self._url, self._protocol, self._headers = url, protocol, headers
        self._is_closed = False
        self._client: Any = None

    async def call(self, name: str, remaining_s: float, *args: Any, **options: Any) -> Any:
        """Run the method `name`; see `Connection.call`."""
        try:
            async with asyncio.timeout(remaining_s):
                return await getattr(self._opened(), name)(*args, **_with_headers(options, self._headers))
        except Exception as error:
            raise _failure(self._url, error, remaining_s, self._is_closed) from None

    async def close(self) -> None:
        """Close all sockets of the connection."""
        self._is_closed = True
        if self._client is not None:
            await self._client.close()

    def _opened(self) -> Any:
        if self._is_closed:
            raise RuntimeError
        if self._client is None:  # here, because the client needs a running loop
            if self._protocol == "grpc":
                self._client = tritonclient.grpc.aio.InferenceServerClient(self._url, channel_args=CHANNEL)
            else:
                self._client = AsyncRestClient(self._url)
        return self._client


async def run_async(connection: AsyncConnection, flow: Flow[Result]) -> Result:
    """Run a flow with asyncio; see `run`."""
    result: Any = None
    error: ClassifierError | None = None
    try:
        while True:
            step = flow.throw(error) if error else flow.send(result)
            result = error = None
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                continue
            try:
                result = await connection.call(step.name, step.timeout_s, *step.args, **step.options)
            except ClassifierError as failed:
                error = failed
    except StopIteration as done:
        value: Result = done.value
        return value
    finally:
        flow.close()  # immediately, also after a cancellation
        del error


def _with_headers(options: dict[str, Any], headers: Headers) -> dict[str, Any]:
    return {**options, "headers": {**options.get("headers", {}), **headers}} if headers else options


def _failure(url: str, error: Exception, remaining_s: float, is_closed: bool) -> Exception:
    # Frames of tritonclient and their error refer to each other, and keep the request in memory.
    error.__traceback__ = None
    if is_closed:
        return RuntimeError("the classifier is closed")
    # A network that loses packets raises TimeoutError, too, but with an errno.
    if isinstance(error, TimeoutError) and not error.errno:
        return TimedOut(f"{url}: no response within {remaining_s:.3g} s")
    # A connection that breaks is an OSError, too.
    if isinstance(error, FOREIGN) and not isinstance(error, OSError) and not connection_hint(str(error)):
        return Unreachable(
            f"{url}: expected a response of Triton's HTTP port, got {type(error).__name__}; fix: {PORTS_HINT}"
        )
    return from_failure(url, error)

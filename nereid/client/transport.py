"""Connections to a server: every call has a deadline, and all failures share one error hierarchy.

Requests are written once, as coroutines. A blocking connection waits inside its methods and never suspends a
coroutine, so `run` needs no event loop.
"""

import asyncio
import http.client
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from nereid.base.contract import GRPC_PORT, HTTP_PORT
from nereid.client.client_errors import TimedOut, Unreachable, connection_hint, from_triton
from nereid.client.request import CHANNEL_OPTIONS, NO_HEADERS, Headers, ProtocolName
from nereid.client.rest import BlockingRestClient, RestClient

# Errors raised for a response that is not HTTP or not JSON.
NOT_TRITON_ERRORS = (http.client.BadStatusLine, ValueError)
PORTS_HINT = f"the port; by default Triton has HTTP on {HTTP_PORT} and gRPC on {GRPC_PORT}"
Argument = TypeVar("Argument")
Value = TypeVar("Value")


class Connection(ABC):
    """Runs the methods of tritonclient's clients.

    Args:
        headers: headers added to each request.
    """

    def __init__(self, url: str, protocol: ProtocolName, headers: Headers = NO_HEADERS) -> None:
        self.url, self.protocol = url, protocol
        self._headers = headers
        self._is_closed = False

    async def call(self, name: str, remaining_s: float, *args: Any, **options: Any) -> Any:
        """Run the method `name` and return its result.

        Raises:
            NereidError: the method failed, or took longer than `remaining_s`.
            RuntimeError: the connection is closed.
        """
        if self._headers:
            options["headers"] = {**options.get("headers", {}), **self._headers}
        try:
            return await self._call(name, remaining_s, args, options)
        except Exception as error:
            raise _failure(self.url, error, remaining_s, self._is_closed) from None

    async def read(self, name: str, remaining_s: float, *args: Any) -> Any:
        """Like `call`, for a method that returns a document, which gRPC returns as JSON only on request."""
        options = {"as_json": True} if self.protocol == "grpc" else {}
        return await self.call(name, remaining_s, *args, **options)

    @abstractmethod
    async def _call(self, name: str, remaining_s: float, args: tuple[Any, ...], options: Any) -> Any: ...

    @abstractmethod
    async def pause(self, seconds: float) -> None:
        """Wait between two attempts."""

    @abstractmethod
    async def convert(self, function: Callable[[Argument], Value], argument: Argument) -> Value:
        """Return the value of a function that may read a file or run for a long time."""


class BlockingConnection(Connection):
    """A thread-safe connection, opened by the first call."""

    def __init__(self, url: str, protocol: ProtocolName, headers: Headers = NO_HEADERS) -> None:
        super().__init__(url, protocol, headers)
        self._client: Any
        if protocol == "grpc":
            self._client = tritonclient.grpc.InferenceServerClient(url, channel_args=CHANNEL_OPTIONS)
        else:
            self._client = BlockingRestClient(url)

    async def _call(self, name: str, remaining_s: float, args: tuple[Any, ...], options: Any) -> Any:
        if self.protocol == "http":
            return self._client.call(name, remaining_s, *args, **options)
        return getattr(self._client, name)(*args, client_timeout=remaining_s, **options)

    async def pause(self, seconds: float) -> None:
        """Wait between two attempts."""
        time.sleep(seconds)

    async def convert(self, function: Callable[[Argument], Value], argument: Argument) -> Value:
        """Return the value of a function."""
        return function(argument)

    def close(self) -> None:
        """Close all sockets; calls in flight fail."""
        self._is_closed = True
        self._client.close()


class AsyncConnection(Connection):
    """A connection for the tasks of one event loop; cancelling a task cancels its gRPC call."""

    _client: Any = None

    async def _call(self, name: str, remaining_s: float, args: tuple[Any, ...], options: Any) -> Any:
        async with asyncio.timeout(remaining_s):
            return await getattr(self._opened(), name)(*args, **options)

    async def pause(self, seconds: float) -> None:
        """Wait between two attempts."""
        await asyncio.sleep(seconds)

    async def convert(self, function: Callable[[Argument], Value], argument: Argument) -> Value:
        """Return the value of a function, which runs in a thread unless its argument is bytes."""
        return (
            function(argument) if isinstance(argument, bytes) else await asyncio.to_thread(function, argument)
        )

    async def close(self) -> None:
        """Close all sockets; calls in flight fail."""
        self._is_closed = True
        if self._client is not None:
            await self._client.close()

    def _opened(self) -> Any:
        if self._is_closed:
            raise RuntimeError
        if self._client is None:  # created here because the client needs a running loop
            if self.protocol == "grpc":
                self._client = tritonclient.grpc.aio.InferenceServerClient(
                    self.url, channel_args=CHANNEL_OPTIONS
                )
            else:
                self._client = RestClient(self.url)
        return self._client


def run(coroutine: Coroutine[Any, Any, Value]) -> Value:
    """Return the result of a coroutine over a `BlockingConnection`, or raise its error."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: Value = done.value
        return value
    coroutine.close()
    raise RuntimeError("a coroutine of a blocking client was suspended")


def _failure(url: str, error: Exception, remaining_s: float, is_closed: bool) -> Exception:
    # tritonclient's frames and their error refer to each other, which would keep the request in memory.
    error.__traceback__ = None
    if is_closed:
        return RuntimeError("the client is closed")
    # A network that loses packets also raises TimeoutError, but with an errno.
    if isinstance(error, TimeoutError) and not error.errno:
        return TimedOut(f"{url}: no response within {remaining_s:.3g} s")
    text = error.message() if isinstance(error, InferenceServerException) else ""
    if hint := connection_hint(text or str(error)):
        failure = Unreachable(f"{url}: {hint}")
        failure.hint = hint
        return failure
    if isinstance(error, InferenceServerException):
        return from_triton(error)
    # A broken connection is also an OSError.
    if isinstance(error, NOT_TRITON_ERRORS) and not isinstance(error, OSError):
        return Unreachable(
            f"{url}: expected a response of Triton's HTTP port, got {type(error).__name__}; fix: {PORTS_HINT}"
        )
    return Unreachable(f"{url}: {type(error).__name__}: {error}")

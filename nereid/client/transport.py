"""How a call reaches a server: kept connections, a deadline, one kind of error for all failures."""

import asyncio
import time
from typing import Any, Protocol

import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http.aio

from nereid.client.classifier_errors import ClassifierError, TimedOut, from_failure
from nereid.client.request import CHANNEL, ProtocolName
from nereid.client.rest import RestClient
from nereid.client.sans_io import Flow, Pause, Result


class Connection(Protocol):
    """Calls the methods of tritonclient's clients; safe to use from several threads."""

    def call(self, name: str, remaining_s: float, *args: Any, **options: Any) -> Any:
        """Call the method `name`.

        Raises:
            ClassifierError: it failed, or took longer than `remaining_s`.
            RuntimeError: it is closed.
        """

    def close(self) -> None:
        """Close what is open; calls in flight fail."""


def run(connection: Connection, steps: Flow[Result]) -> Result:
    """Do what `steps` say; returns what they return, and raises what they raise."""
    answer: Any = None
    error: ClassifierError | None = None
    try:
        while True:
            step = steps.throw(error) if error else steps.send(answer)
            answer = error = None
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                continue
            try:
                answer = connection.call(step.name, step.timeout_s, *step.args, **step.options)
            except ClassifierError as failed:
                error = failed
    except StopIteration as done:
        result: Result = done.value
        return result
    finally:
        steps.close()  # at once, also when a signal has come between
        del error  # it knows this frame: together they would stay, with the images, for the collector


def connect(url: str, protocol: ProtocolName) -> Connection:
    """Return a connection, which is opened by its first call."""
    if protocol == "grpc":
        return _Connection(url, tritonclient.grpc.InferenceServerClient(url, channel_args=CHANNEL))
    return _Connection(url, RestClient(url))


class _Connection:
    def __init__(self, url: str, client: Any) -> None:
        self._url, self._client, self._is_closed = url, client, False

    def call(self, name: str, remaining_s: float, *args: Any, **options: Any) -> Any:
        try:
            return getattr(self._client, name)(*args, client_timeout=remaining_s, **options)
        except Exception as error:
            # Some of tritonclient's frames hold their error as that holds them, and the request.
            error.__traceback__ = None
            raise _failure(self._url, error, remaining_s, self._is_closed) from None

    def close(self) -> None:
        self._is_closed = True
        self._client.close()


class AsyncConnection:
    """The same for asyncio: a call that is cancelled cancels its request on the server, too (gRPC)."""

    def __init__(self, url: str, protocol: ProtocolName) -> None:
        self._url, self._protocol = url, protocol
        self._is_closed = False
        self._client: Any = None

    async def call(self, name: str, remaining_s: float, *args: Any, **options: Any) -> Any:
        """Call the method `name`; raises as `Connection.call` does."""
        try:
            async with asyncio.timeout(remaining_s):
                return await getattr(self._opened(), name)(*args, **options)
        except Exception as error:
            # Some of tritonclient's frames hold their error as that holds them, and the request.
            error.__traceback__ = None
            raise _failure(self._url, error, remaining_s, self._is_closed) from None

    async def close(self) -> None:
        """Close what is open."""
        self._is_closed = True
        if self._client is not None:
            await self._client.close()

    def _opened(self) -> Any:
        if self._is_closed:
            raise RuntimeError
        if self._client is None:  # here, because it needs a running loop
            if self._protocol == "grpc":
                self._client = tritonclient.grpc.aio.InferenceServerClient(self._url, channel_args=CHANNEL)
            else:
                # Connections and seconds without a limit of their own: the classifier has both.
                self._client = tritonclient.http.aio.InferenceServerClient(
                    self._url, conn_limit=0, conn_timeout=None
                )
        return self._client


async def run_async(connection: AsyncConnection, steps: Flow[Result]) -> Result:
    """Do what `steps` say; see `run`."""
    answer: Any = None
    error: ClassifierError | None = None
    try:
        while True:
            step = steps.throw(error) if error else steps.send(answer)
            answer = error = None
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                continue
            try:
                answer = await connection.call(step.name, step.timeout_s, *step.args, **step.options)
            except ClassifierError as failed:
                error = failed
    except StopIteration as done:
        result: Result = done.value
        return result
    finally:
        steps.close()  # at once, also when this was cancelled
        del error


def _failure(url: str, error: Exception, remaining_s: float, is_closed: bool) -> Exception:
    if is_closed:
        return RuntimeError("the classifier is closed")
    # The system's own word for a network that loses packets is a TimeoutError, too, with a number.
    if isinstance(error, TimeoutError) and not error.errno:
        return TimedOut(f"{url}: no answer within {remaining_s:.3g} s")
    return from_failure(url, error)

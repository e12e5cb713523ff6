"""How a call reaches a server: kept connections, a deadline, one kind of error for all failures."""

import asyncio
from typing import Any, Protocol

import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http.aio

from clients.errors import ClassifierError, TimedOut, from_failure
from clients.request import CHANNEL
from clients.request import Protocol as ProtocolName
from clients.rest import RestClient


class Connection(Protocol):
    """Calls the methods of tritonclient's clients; safe to use from several threads."""

    def call(self, name: str, remaining_s: float, *args: Any, **options: Any) -> Any:
        """Call the method `name`.

        Raises:
            ClassifierError: it failed, or took longer than `remaining_s`.
        """

    def close(self) -> None:
        """Close what is open."""


def connect(url: str, protocol: ProtocolName) -> Connection:
    """Return a connection, which is opened by its first call."""
    return _Grpc(url) if protocol == "grpc" else _Http(url)


class _Grpc:
    def __init__(self, url: str) -> None:
        self._url = url
        self._client = tritonclient.grpc.InferenceServerClient(url, channel_args=CHANNEL)

    def call(self, name: str, remaining_s: float, *args: Any, **options: Any) -> Any:
        try:
            return getattr(self._client, name)(*args, client_timeout=remaining_s, **options)
        except Exception as error:
            raise _failure(self._url, error, remaining_s) from None

    def close(self) -> None:
        self._client.close()


class _Http:
    def __init__(self, url: str) -> None:
        self._url = url
        self._client = RestClient(url)

    def call(self, name: str, remaining_s: float, *args: Any, **options: Any) -> Any:
        try:
            return getattr(self._client, name)(remaining_s, *args, **options)
        except Exception as error:
            raise _failure(self._url, error, remaining_s) from None

    def close(self) -> None:
        self._client.close()


class AsyncConnection:
    """The same for asyncio: a call that is cancelled cancels its request on the server, too (gRPC)."""

    def __init__(self, url: str, protocol: ProtocolName) -> None:
        self._url, self._protocol = url, protocol
        self._client: Any = None

    async def call(self, name: str, remaining_s: float, *args: Any, **options: Any) -> Any:
        """Call the method `name`; raises as `Connection.call` does."""
        try:
            async with asyncio.timeout(remaining_s):
                return await getattr(self._opened(), name)(*args, **options)
        except Exception as error:
            raise _failure(self._url, error, remaining_s) from None

    async def close(self) -> None:
        """Close what is open."""
        if self._client is not None:
            await self._client.close()

    def _opened(self) -> Any:
        if self._client is None:  # here, because it needs a running loop
            if self._protocol == "grpc":
                self._client = tritonclient.grpc.aio.InferenceServerClient(self._url, channel_args=CHANNEL)
            else:
                # Connections and seconds without a limit of their own: the classifier has both.
                self._client = tritonclient.http.aio.InferenceServerClient(
                    self._url, conn_limit=0, conn_timeout=None
                )
        return self._client


def _failure(url: str, error: Exception, remaining_s: float) -> ClassifierError:
    # The system's own word for a network that loses packets is a TimeoutError, too, with a number.
    if isinstance(error, TimeoutError) and not error.errno:
        return TimedOut(f"{url}: no answer within {remaining_s:.3g} s")
    return from_failure(url, error)

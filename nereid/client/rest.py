"""KServe v2 clients over HTTP: the same methods for blocking and asyncio use."""

import http.client
import json
import os
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from tritonclient.utils import InferenceServerException

from nereid.base.addresses import unix_path
from nereid.base.http_connection import HttpConnectionPool
from nereid.client.request import HttpInput
from nereid.client.result_kind import HttpResult

JSON_LENGTH_HEADER = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class Request:
    """A request: its path is relative to `/v2/`, and its body is the concatenation of `body`.

    `read` converts the body of a successful response, given the size of its JSON header if binary data
    follows; by default, the body is ignored.
    """

    method: str
    path: str
    timeout_s: float
    body: Sequence[bytes] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[bytes, int | None], Any] = lambda content, json_size: None


class RestMethods(ABC):
    """The methods of a client; the asyncio client returns each result as an awaitable.

    `client_timeout` is the request's time limit in seconds; with asyncio, use its timeouts instead. Methods
    raise InferenceServerException with the server's message, or HTTPException for a malformed response.
    """

    @abstractmethod
    def _send(self, request: Request) -> Any:
        """Send a request and return its result."""

    def infer(
        self,
        model: str,
        headers: Mapping[str, str],
        *,
        inputs: Sequence[HttpInput],
        outputs: Sequence[Mapping[str, Any]],
        request_id: str,
        timeout: int,
        client_timeout: float = 0.0,
    ) -> Any:
        """Run a model and return its `HttpResult`; `timeout` is the server-side limit in µs."""
        document = {
            "id": request_id,
            "parameters": {"timeout": timeout},
            "inputs": [tensor.document() for tensor in inputs],
            "outputs": outputs,
        }
        head = json.dumps(document, separators=(",", ":")).encode()
        body = [head, *(part for tensor in inputs for part in tensor.parts)]
        length = {JSON_LENGTH_HEADER: str(len(head))} if len(body) > 1 else {}
        path = f"models/{quote(model)}/infer"

        def read(content: bytes, json_size: int | None) -> Any:
            result = HttpResult(content, json_size)
            response_id = result.get_response().get("id", request_id)
            if response_id != request_id:
                raise http.client.HTTPException(
                    f"expected the response to request {request_id!r}, got that to {response_id!r}"
                )
            return result

        return self._send(Request("POST", path, client_timeout, body, {**headers, **length}, read))

    def get_model_metadata(
        self, model: str, headers: Mapping[str, str] = {}, *, client_timeout: float = 0.0
    ) -> Any:
        """Return a model's metadata as a mapping."""
        return self._get_json(f"models/{quote(model)}", client_timeout, headers)

    def register_system_shared_memory(self, name: str, key: str, byte_size: int, **options: Any) -> Any:
        """Register a region of system shared memory."""
        fields = {"key": key, "offset": 0, "byte_size": byte_size}
        return self._change_region(f"systemsharedmemory/region/{name}/register", fields, **options)

    def register_cuda_shared_memory(
        self, name: str, raw_handle: bytes, device_id: int, byte_size: int, **options: Any
    ) -> Any:
        """Register a region of GPU memory."""
        fields = {"raw_handle": {"b64": raw_handle.decode()}, "device_id": device_id, "byte_size": byte_size}
        return self._change_region(f"cudasharedmemory/region/{name}/register", fields, **options)

    def unregister_system_shared_memory(self, name: str, **options: Any) -> Any:
        """Release a region of system shared memory."""
        return self._change_region(f"systemsharedmemory/region/{name}/unregister", **options)

    def unregister_cuda_shared_memory(self, name: str, **options: Any) -> Any:
        """Release a region of GPU memory."""
        return self._change_region(f"cudasharedmemory/region/{name}/unregister", **options)

    def get_system_shared_memory_status(
        self, headers: Mapping[str, str] = {}, *, client_timeout: float = 0.0
    ) -> Any:
        """Return a list of the registered system shared memory regions."""
        return self._get_json("systemsharedmemory/status", client_timeout, headers)

    def _change_region(
        self,
        path: str,
        fields: Mapping[str, Any] = {},
        headers: Mapping[str, str] = {},
        client_timeout: float = 0.0,
    ) -> Any:
        body = [json.dumps(fields).encode()] if fields else []
        return self._send(Request("POST", path, client_timeout, body, headers))

    def _get_json(self, path: str, timeout_s: float, headers: Mapping[str, str] = {}) -> Any:
        return self._send(
            Request("GET", path, timeout_s, (), headers, lambda content, _: json.loads(content))
        )


def json_size_of(header: str | bytes | None) -> int | None:
    """Return the size of a response's JSON header, or None if no binary data follows it."""
    return None if header is None else int(header)


def failure_of(status: int, content: bytes) -> InferenceServerException:
    """Return the error for an unsuccessful response: Triton's message, or tritonclient's if there is none."""
    try:
        message = str(json.loads(content)["error"])
    except (ValueError, LookupError, TypeError):
        text = content[:200].decode(errors="replace")
        message = f"an exception occurred in the client while decoding the response: {text!r}"
    return InferenceServerException(message, str(status))


class RestClient(RestMethods):
    """Blocking client that is safe to use from several threads, which share its connections.

    All methods may also raise socket errors and TimeoutError.

    Args:
        url: server address, HOST:PORT or `unix:PATH`.
    """

    def __init__(self, url: str) -> None:
        self._path = unix_path(url)
        host, _, port = "localhost:0".rpartition(":") if self._path else url.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[_DeadlineConnection] = []
        self._busy: set[_DeadlineConnection] = set()
        self._is_closed = False

    def close(self) -> None:
        """Close all connections; requests in flight fail."""
        with self._lock_of_this_process():
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()
            for connection in self._busy:
                connection.abort()

    def _send(self, request: Request) -> Any:
        connection = self._take(time.monotonic() + request.timeout_s)
        is_sent = False
        try:
            # A server may reject a body and close the connection before receiving all of it.
            with suppress(BrokenPipeError, ConnectionResetError):
                # Sent in one piece, because http.client sends each part separately.
                body = b"".join(request.body)
                connection.request(request.method, f"/v2/{request.path}", body, dict(request.headers))
                is_sent = True
            response = connection.getresponse()
            content = response.read()
            if response.status == http.client.OK:
                result = request.read(content, json_size_of(response.headers.get(JSON_LENGTH_HEADER)))
        except BaseException:
            self._put_back(connection, is_usable=False)  # part of this or another response may be left
            raise
        self._put_back(connection, is_sent)
        if response.status != http.client.OK:
            raise failure_of(response.status, content)
        return result

    def _take(self, deadline: float) -> "_DeadlineConnection":
        with self._lock_of_this_process():
            if self._is_closed:
                raise RuntimeError
            connection = None
            while self._idle and connection is None:
                connection = self._idle.pop()
                if not connection.is_alive():
                    connection.close()
                    connection = None
            connection = connection or _DeadlineConnection(self._host, self._port, self._path)
            connection.deadline = deadline
            self._busy.add(connection)
            return connection

    def _put_back(self, connection: "_DeadlineConnection", is_usable: bool) -> None:
        with self._lock_of_this_process():
            self._busy.discard(connection)
            if is_usable and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _lock_of_this_process(self) -> threading.Lock:
        if os.getpid() != self._owner:  # a forked process shares its parent's sockets
            self._owner = os.getpid()
            self._lock = threading.Lock()
            self._idle = []
            self._busy = set()
        return self._lock


class _DeadlineConnection(http.client.HTTPConnection):
    """Limits every operation to `deadline`, in monotonic seconds, even if a server sends byte by byte."""

    sock: "_Socket | None"
    deadline = 0.0
    is_aborted = False

    def __init__(self, host: str, port: int, path: str) -> None:
        super().__init__(host, port)
        self._path = path

    def connect(self) -> None:
        """Connect to the host's first address that accepts a connection, within the deadline."""
        failure: OSError = OSError(f"{self.host} has no address")
        addresses: list[Any] = [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", self._path)]
        if not self._path:
            addresses = _addresses(self.host, self.port, self.remaining_s())
        for family, kind, protocol, _, address in addresses:
            self.sock = _Socket(self, family, kind, protocol)
            try:
                self.sock.settimeout(self.remaining_s())
                self.sock.connect(address)
                if not self._path:
                    self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return
            except OSError as error:
                self.close()
                failure = error
        raise failure

    def remaining_s(self) -> float:
        """Return the time left, in seconds.

        Raises:
            TimeoutError: no time is left.
            ConnectionAbortedError: `abort` was called.
        """
        if self.is_aborted:
            raise ConnectionAbortedError
        remaining_s = self.deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s

    def abort(self) -> None:
        """Make the operation in progress in another thread fail immediately."""
        self.is_aborted = True
        if sock := self.sock:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def is_alive(self) -> bool:
        """Return whether the server has kept the connection open without sending anything."""
        return self.sock is not None and self.sock.is_quiet()


class _Socket(socket.socket):
    """Limits each operation to the connection's remaining time."""

    def __init__(self, connection: _DeadlineConnection, *about: int) -> None:
        super().__init__(*about)
        self._connection = connection

    def sendall(self, *args: Any) -> None:
        self.settimeout(self._connection.remaining_s())
        super().sendall(*args)

    def recv_into(self, *args: Any) -> int:
        self.settimeout(self._connection.remaining_s())
        return super().recv_into(*args)

    def is_quiet(self) -> bool:
        self.settimeout(0)
        try:
            self.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


def _addresses(host: str, port: int, timeout_s: float) -> list[Any]:
    """Return the result of `getaddrinfo`, run in a thread because it has no timeout."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            results.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            results.put(error)

    threading.Thread(target=resolve, daemon=True).start()
    try:
        addresses = results.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(addresses, Exception):
        raise addresses
    return list(addresses)


_JSON_LENGTH_HEADER = JSON_LENGTH_HEADER.lower().encode()


class AsyncRestClient(RestMethods):
    """Asyncio client for one event loop, whose tasks share its connections.

    All methods return awaitables, and may also raise the errors of `HttpConnection`.

    Args:
        url: server address, HOST:PORT or `unix:PATH`.
    """

    def __init__(self, url: str) -> None:
        self._connections = HttpConnectionPool(url)

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        self._connections.close()

    async def _send(self, request: Request) -> Any:
        lines = ((name.encode(), value.encode()) for name, value in request.headers.items())
        head = self._connections.build_head(
            request.method, f"/v2/{request.path}", lines, sum(map(len, request.body))
        )
        async with self._connections.acquire() as connection:
            response = await connection.send([head, *filter(None, request.body)])
            if response.status == http.client.OK:
                # A malformed response, or one to another request, closes the connection.
                result = request.read(response.body, json_size_of(response.headers.get(_JSON_LENGTH_HEADER)))
        if response.status != http.client.OK:
            raise failure_of(response.status, response.body)
        return result

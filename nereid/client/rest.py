"""Blocking KServe v2 client over HTTP: threads share its connections, and each request has one deadline.

It replaces the client of tritonclient, which uses gevent. Gevent gives every thread a loop, whose four files
stay open when the thread ends. Its timeouts hold for one operation of the socket.
"""

import http.client
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partialmethod
from typing import Any
from urllib.parse import quote

from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

from nereid.addresses import unix_path
from nereid.client.shared_regions import Kind

LENGTH = "Inference-Header-Content-Length"


class RestClient:
    """The methods of tritonclient that a classifier needs, each with gRPC's `client_timeout` in seconds.

    All threads share the connections. All methods raise the errors of the socket, TimeoutError, or
    InferenceServerException with the server's message.

    Args:
        url: address of the server, HOST:PORT or `unix:PATH`.
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

    def infer(self, model: str, headers: Mapping[str, str], *, client_timeout: float, **options: Any) -> Any:
        """Run a model, and return tritonclient's `InferResult`."""
        body, json_size = InferenceServerClient.generate_request_body(**options)
        length = {} if json_size is None else {LENGTH: str(json_size)}
        path, request_id = f"models/{quote(model)}/infer", options.get("request_id")

        def read(content: bytes, json_size: int | None) -> Any:
            result = InferenceServerClient.parse_response_body(content, header_length=json_size)
            response_id = result.get_response().get("id", request_id)
            if response_id != request_id:
                raise http.client.HTTPException(
                    f"expected the response to request {request_id!r}, got that to {response_id!r}"
                )
            return result

        return self._request("POST", path, client_timeout, body, {**headers, **length}, read)

    def get_model_metadata(
        self, model: str, headers: Mapping[str, str] = {}, *, client_timeout: float
    ) -> Any:
        """Return a model's metadata as a mapping."""
        return self._get_json(f"models/{quote(model)}", client_timeout, headers)

    def register_system_shared_memory(
        self, name: str, key: str, byte_size: int, *, client_timeout: float, **options: Any
    ) -> None:
        """Register a region of system shared memory."""
        fields = {"key": key, "offset": 0, "byte_size": byte_size}
        self._change_region("system", name, "register", client_timeout, fields, **options)

    def register_cuda_shared_memory(
        self, name: str, raw_handle: bytes, device_id: int, byte_size: int, *, client_timeout: float
    ) -> None:
        """Register a region of GPU memory."""
        fields = {"raw_handle": {"b64": raw_handle.decode()}, "device_id": device_id, "byte_size": byte_size}
        self._change_region("cuda", name, "register", client_timeout, fields)

    def _unregister(self, kind: Kind, name: str, *, client_timeout: float, **options: Any) -> None:
        self._change_region(kind, name, "unregister", client_timeout, **options)

    def _regions(self, kind: Kind, headers: Mapping[str, str] = {}, *, client_timeout: float) -> Any:
        return self._get_json(f"{kind}sharedmemory/status", client_timeout, headers)

    unregister_system_shared_memory = partialmethod(_unregister, "system")
    unregister_cuda_shared_memory = partialmethod(_unregister, "cuda")
    get_system_shared_memory_status = partialmethod(_regions, "system")
    get_cuda_shared_memory_status = partialmethod(_regions, "cuda")

    def _change_region(
        self,
        kind: Kind,
        name: str,
        change: str,
        timeout_s: float,
        fields: Mapping[str, Any] = {},
        headers: Mapping[str, str] = {},
    ) -> None:
        path = f"{kind}sharedmemory/region/{name}/{change}"
        self._request("POST", path, timeout_s, json.dumps(fields).encode() if fields else b"", headers)

    def _get_json(self, path: str, timeout_s: float, headers: Mapping[str, str] = {}) -> Any:
        return self._request("GET", path, timeout_s, b"", headers, lambda content, _: json.loads(content))

    def _request(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: bytes = b"",
        headers: Mapping[str, str] = {},
        read: Callable[[bytes, int | None], Any] = lambda content, json_size: None,
    ) -> Any:
        """Send a request; `read` converts the body, given the size of its JSON header if data follow it."""
        connection = self._take(time.monotonic() + timeout_s)
        is_sent = False
        try:
            # A server may reject a body, and close the connection, before the end of the body.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, f"/v2/{path}", body, dict(headers))
                is_sent = True
            response = connection.getresponse()
            content = response.read()
            if response.status == http.client.OK:
                size = response.headers.get(LENGTH)
                result = read(content, None if size is None else int(size))
        except BaseException:
            self._put_back(connection, is_usable=False)  # half a response, or another's, may be left
            raise
        self._put_back(connection, is_sent)
        if response.status != http.client.OK:
            raise InferenceServerException(_error_text(content), str(response.status))
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

    def _put_back(self, connection: "_DeadlineConnection", is_usable: bool = True) -> None:
        with self._lock_of_this_process():
            self._busy.discard(connection)
            if is_usable and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _lock_of_this_process(self) -> threading.Lock:
        if os.getpid() != self._owner:  # a fork shares the sockets of its parent
            self._owner, self._lock, self._idle, self._busy = os.getpid(), threading.Lock(), [], set()
        return self._lock


class _DeadlineConnection(http.client.HTTPConnection):
    """Ends every operation at `deadline`, in monotonic seconds, also if a server sends byte by byte."""

    sock: "_Socket | None"
    deadline = 0.0
    is_aborted = False

    def __init__(self, host: str, port: int, path: str) -> None:
        super().__init__(host, port)
        self._path = path

    def connect(self) -> None:
        """Connect to the first address of the host that accepts, within the deadline."""
        failure: OSError = OSError(f"{self.host} has no address")
        for family, kind, protocol, _, address in self._addresses():
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

    def _addresses(self) -> list[Any]:
        if self._path:
            return [(socket.AF_UNIX, socket.SOCK_STREAM, 0, "", self._path)]
        return _addresses(self.host, self.port, self.remaining_s())

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
        """Fail the thread that uses the connection, immediately."""
        self.is_aborted = True
        if sock := self.sock:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def is_alive(self) -> bool:
        """Return whether the server keeps the connection open, and has sent nothing."""
        return self.sock is not None and self.sock.is_quiet()


class _Socket(socket.socket):
    """Limits each operation to the time left of its connection."""

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
    """Return the result of `getaddrinfo`, in a thread because the function has no timeout."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            found.put(error)

    threading.Thread(target=resolve, daemon=True).start()
    try:
        addresses = found.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(addresses, Exception):
        raise addresses
    return list(addresses)


def _error_text(content: bytes) -> str:
    """Return Triton's error message, or tritonclient's own text for a body without one."""
    try:
        return str(json.loads(content)["error"])
    except (ValueError, LookupError, TypeError):
        text = content[:200].decode(errors="replace")
        return f"an exception occurred in the client while decoding the response: {text!r}"

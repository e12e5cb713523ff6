"""Blocking KServe v2 client over HTTP: threads share its connections, and each request has one deadline.

It replaces the client of tritonclient, which uses gevent. Gevent gives every thread a loop, whose four files
stay open when the thread ends. Its timeouts hold for one operation of the socket.
"""

import http.client
import os
import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from nereid.base.addresses import unix_path
from nereid.client.rest.methods import LENGTH, Request, RestMethods, failure_of, json_size_of


class RestClient(RestMethods):
    """The methods for all threads, which share the connections.

    All methods also raise the errors of the socket, and TimeoutError.

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

    def _send(self, request: Request) -> Any:
        connection = self._take(time.monotonic() + request.timeout_s)
        is_sent = False
        try:
            # A server may reject a body, and close the connection, before the end of the body.
            with suppress(BrokenPipeError, ConnectionResetError):
                # In one piece, because http.client sends each part on its own.
                body = b"".join(request.body)
                connection.request(request.method, f"/v2/{request.path}", body, dict(request.headers))
                is_sent = True
            response = connection.getresponse()
            content = response.read()
            if response.status == http.client.OK:
                result = request.read(content, json_size_of(response.headers.get(LENGTH)))
        except BaseException:
            self._put_back(connection, is_usable=False)  # half a response, or another's, may be left
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

"""KServe v2 over HTTP, blocking: connections that any thread may use, each call with one deadline.

Not the client of tritonclient: it is built on gevent, which gives every thread a loop of its own and leaves
its four files open when the thread ends, and whose timeouts are per operation of the socket.
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
from typing import Any
from urllib.parse import quote

from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

LENGTH = "Inference-Header-Content-Length"


class RestClient:
    """The methods of tritonclient that a classifier needs, each with gRPC's `client_timeout` in seconds.

    Connections are kept and shared by all threads. All methods raise what the socket raises, TimeoutError, or
    InferenceServerException with the server's own words.

    Args:
        url: HOST:PORT.
    """

    def __init__(self, url: str) -> None:
        host, _, port = url.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._is_closed = False

    def close(self) -> None:
        """Close all connections; those in use fail."""
        with self._lock_of_this_process():
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()
            for connection in self._busy:
                connection.abort()

    def infer(self, model: str, headers: Mapping[str, str], *, client_timeout: float, **options: Any) -> Any:
        """Return tritonclient's `InferResult`."""
        body, json_size = InferenceServerClient.generate_request_body(**options)
        length = {} if json_size is None else {LENGTH: str(json_size)}
        path, request_id = f"models/{quote(model)}/infer", options.get("request_id")

        def read(answer: bytes, json_size: int | None) -> Any:
            result = InferenceServerClient.parse_response_body(answer, header_length=json_size)
            answered_id = result.get_response().get("id", request_id)
            if answered_id != request_id:
                raise http.client.HTTPException(f"the answer is to another request, {answered_id!r}")
            return result

        return self._request("POST", path, client_timeout, body, {**headers, **length}, read)

    def get_model_metadata(self, model: str, *, client_timeout: float) -> Any:
        """Return a model's metadata as a mapping."""
        return self._get_json("GET", f"models/{quote(model)}", client_timeout)

    def register_system_shared_memory(
        self, name: str, key: str, byte_size: int, *, client_timeout: float
    ) -> None:
        """Let the server map a region."""
        about = {"key": key, "offset": 0, "byte_size": byte_size}
        self._request(
            "POST", f"systemsharedmemory/region/{name}/register", client_timeout, json.dumps(about).encode()
        )

    def unregister_system_shared_memory(
        self, name: str, headers: Mapping[str, str] = {}, *, client_timeout: float
    ) -> None:
        """Have the server let go of a region."""
        self._request("POST", f"systemsharedmemory/region/{name}/unregister", client_timeout, headers=headers)

    def get_system_shared_memory_status(
        self, headers: Mapping[str, str] = {}, *, client_timeout: float
    ) -> Any:
        """Return the regions as a list."""
        return self._get_json("GET", "systemsharedmemory/status", client_timeout, headers)

    def register_cuda_shared_memory(
        self, name: str, raw_handle: bytes, device_id: int, byte_size: int, *, client_timeout: float
    ) -> None:
        """Let the server map a region of a GPU."""
        about = {
            "raw_handle": {"b64": raw_handle.decode()},
            "device_id": device_id,
            "byte_size": byte_size,
        }
        self._request(
            "POST", f"cudasharedmemory/region/{name}/register", client_timeout, json.dumps(about).encode()
        )

    def unregister_cuda_shared_memory(
        self, name: str, headers: Mapping[str, str] = {}, *, client_timeout: float
    ) -> None:
        """Have the server let go of a region of a GPU."""
        self._request("POST", f"cudasharedmemory/region/{name}/unregister", client_timeout, headers=headers)

    def get_cuda_shared_memory_status(self, headers: Mapping[str, str] = {}, *, client_timeout: float) -> Any:
        """Return the regions of GPUs as a list."""
        return self._get_json("GET", "cudasharedmemory/status", client_timeout, headers)

    def _get_json(self, method: str, path: str, timeout_s: float, headers: Mapping[str, str] = {}) -> Any:
        return self._request(
            method, path, timeout_s, headers=headers, read=lambda answer, _: json.loads(answer)
        )

    def _request(
        self,
        method: str,
        path: str,
        timeout_s: float,
        body: bytes = b"",
        headers: Mapping[str, str] = {},
        read: Callable[[bytes, int | None], Any] = lambda answer, json_size: None,
    ) -> Any:
        """Return what `read` makes of an answer, and of how much of it is JSON if something follows."""
        connection = self._take(time.monotonic() + timeout_s)
        is_sent = False
        try:
            # Who refuses a body may say so, and hang up, before the end of it.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, f"/v2/{path}", body, dict(headers))
                is_sent = True
            response = connection.getresponse()
            answer = response.read()
            if response.status == http.client.OK:
                size = response.headers.get(LENGTH)
                result = read(answer, None if size is None else int(size))
        except BaseException:
            self._put_back(connection, is_usable=False)  # an answer may be half read, or another's
            raise
        self._put_back(connection, is_sent)
        if response.status != http.client.OK:
            raise InferenceServerException(_error_text(answer), str(response.status))
        return result

    def _take(self, deadline: float) -> "_Connection":
        with self._lock_of_this_process():
            if self._is_closed:
                raise RuntimeError
            connection = None
            while self._idle and connection is None:
                connection = self._idle.pop()
                if not connection.is_alive():
                    connection.close()
                    connection = None
            connection = connection or _Connection(self._host, self._port)
            connection.deadline = deadline
            self._busy.add(connection)
            return connection

    def _put_back(self, connection: "_Connection", is_usable: bool = True) -> None:
        with self._lock_of_this_process():
            self._busy.discard(connection)
            if is_usable and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _lock_of_this_process(self) -> threading.Lock:
        if os.getpid() != self._owner:  # a fork: what is open is shared with its parent
            self._owner, self._lock, self._idle, self._busy = os.getpid(), threading.Lock(), [], set()
        return self._lock


class _Connection(http.client.HTTPConnection):
    """Ends whatever it does at `deadline`, in monotonic seconds: also with a server that dribbles."""

    sock: "_Socket | None"
    deadline = 0.0
    is_aborted = False

    def connect(self) -> None:
        """Try the addresses of the host, each for as long as there is."""
        failure: OSError = OSError(f"{self.host} has no address")
        for family, kind, protocol, _, address in _addresses(self.host, self.port, self.remaining_s()):
            self.sock = _Socket(self, family, kind, protocol)
            try:
                self.sock.settimeout(self.remaining_s())
                self.sock.connect(address)
                self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return
            except OSError as error:
                self.close()
                failure = error
        raise failure

    def remaining_s(self) -> float:
        """Return how long it may still take.

        Raises:
            TimeoutError: the time is up.
            ConnectionAbortedError: it was given up.
        """
        if self.is_aborted:
            raise ConnectionAbortedError
        remaining_s = self.deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        return remaining_s

    def abort(self) -> None:
        """Have the thread that uses it fail at once."""
        self.is_aborted = True
        if sock := self.sock:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def is_alive(self) -> bool:
        """Tell whether the server keeps it open, and has said nothing unasked."""
        return self.sock is not None and self.sock.is_quiet()


class _Socket(socket.socket):
    """Bounds each operation by what its connection has left."""

    def __init__(self, connection: _Connection, *about: int) -> None:
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
    """Return what `getaddrinfo` says, in a thread: it knows no timeout."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            found.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = found.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return list(answer)


def _error_text(answer: bytes) -> str:
    """Return Triton's reason; of another kind of answer, what tritonclient says then."""
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, LookupError, TypeError):
        text = answer[:200].decode(errors="replace")
        return f"an exception occurred in the client while decoding the response: {text!r}"

"""KServe v2 over HTTP, blocking: connections that any thread may use, each call with one deadline.

Not the client of tritonclient: it is built on gevent, which gives every thread a loop of its own and leaves
its four files open when the thread ends, and whose timeouts are per operation of the socket.
"""

import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

LENGTH = "Inference-Header-Content-Length"
READ_BYTES = 2**16


class RestClient:
    """The methods of tritonclient's HTTP client that a classifier needs, each with `timeout_s` in front.

    Connections are kept and shared by all threads. All methods raise what the socket raises, TimeoutError, or
    InferenceServerException with the server's own words.

    Args:
        url: HOST:PORT.
    """

    def __init__(self, url: str) -> None:
        self._host, _, port = url.rpartition(":")
        self._port = int(port)
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Close all connections; those in use when their answer has come."""
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()

    def infer(self, timeout_s: float, model: str, headers: Mapping[str, str], **options: Any) -> Any:
        """Return tritonclient's `InferResult`."""
        body, json_size = InferenceServerClient.generate_request_body(**options)
        length = {} if json_size is None else {LENGTH: str(json_size)}
        path = f"models/{quote(model)}/infer"
        answer, size = self._ask("POST", path, timeout_s, body, {**headers, **length})
        return InferenceServerClient.parse_response_body(answer, header_length=size)

    def get_model_metadata(self, timeout_s: float, model: str) -> Any:
        """Return a model's metadata as a mapping."""
        return self._ask_json("GET", f"models/{quote(model)}", timeout_s)

    def register_system_shared_memory(self, timeout_s: float, name: str, key: str, byte_size: int) -> None:
        """Let the server map a region."""
        about = {"key": key, "offset": 0, "byte_size": byte_size}
        self._ask("POST", f"systemsharedmemory/region/{name}/register", timeout_s, json.dumps(about).encode())

    def unregister_system_shared_memory(
        self, timeout_s: float, name: str, headers: Mapping[str, str] = {}
    ) -> None:
        """Have the server let go of a region."""
        self._ask("POST", f"systemsharedmemory/region/{name}/unregister", timeout_s, headers=headers)

    def get_system_shared_memory_status(self, timeout_s: float, headers: Mapping[str, str] = {}) -> Any:
        """Return the regions as a list."""
        return self._ask_json("GET", "systemsharedmemory/status", timeout_s, headers)

    def register_cuda_shared_memory(
        self, timeout_s: float, name: str, raw_handle: bytes, device_id: int, byte_size: int
    ) -> None:
        """Let the server map a region of a GPU."""
        about = {
            "raw_handle": {"b64": raw_handle.decode()},
            "device_id": device_id,
            "byte_size": byte_size,
        }
        self._ask("POST", f"cudasharedmemory/region/{name}/register", timeout_s, json.dumps(about).encode())

    def unregister_cuda_shared_memory(
        self, timeout_s: float, name: str, headers: Mapping[str, str] = {}
    ) -> None:
        """Have the server let go of a region of a GPU."""
        self._ask("POST", f"cudasharedmemory/region/{name}/unregister", timeout_s, headers=headers)

    def get_cuda_shared_memory_status(self, timeout_s: float, headers: Mapping[str, str] = {}) -> Any:
        """Return the regions of GPUs as a list."""
        return self._ask_json("GET", "cudasharedmemory/status", timeout_s, headers)

    def _ask_json(self, method: str, path: str, timeout_s: float, headers: Mapping[str, str] = {}) -> Any:
        return json.loads(self._ask(method, path, timeout_s, headers=headers)[0])

    def _ask(
        self, method: str, path: str, timeout_s: float, body: bytes = b"", headers: Mapping[str, str] = {}
    ) -> tuple[bytes, int | None]:
        """Return the body of the answer, and how much of it is JSON if something follows."""
        connection = self._take()
        try:
            connection.deadline = time.monotonic() + timeout_s
            connection.timeout = timeout_s
            connection.request(method, f"/v2/{path}", body, dict(headers))
            response = connection.getresponse()
            answer = response.read()
        except BaseException:
            connection.close()  # an answer may be half read
            raise
        self._put_back(connection)
        if response.status != http.client.OK:
            raise InferenceServerException(_why(answer), str(response.status))
        size = response.headers.get(LENGTH)
        return answer, None if size is None else int(size)

    def _take(self) -> "_Connection":
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the classifier is closed")
            while self._idle:
                connection = self._idle.pop()
                if connection.is_alive():
                    return connection
                connection.close()
        return _Connection(self._host, self._port)

    def _put_back(self, connection: "_Connection") -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()


class _Connection(http.client.HTTPConnection):
    """Ends whatever it does at `deadline`, in monotonic seconds: also with a server that dribbles."""

    deadline = 0.0

    def connect(self) -> None:
        super().connect()
        self.sock: Any = _Socket(self.sock, self)

    def is_alive(self) -> bool:
        """Tell whether the server keeps it open, and has said nothing unasked."""
        return self.sock is not None and self.sock.is_quiet()


class _Socket:
    def __init__(self, sock: socket.socket, connection: _Connection) -> None:
        self._sock, self._connection = sock, connection

    def sendall(self, data: bytes) -> None:
        self._in_time().sendall(data)

    def recv_into(self, buffer: Any) -> int:
        return self._in_time().recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reader(self), READ_BYTES)

    def is_quiet(self) -> bool:
        self._sock.settimeout(0)
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        self._sock.close()

    def _in_time(self) -> socket.socket:
        remaining_s = self._connection.deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._sock.settimeout(remaining_s)
        return self._sock


class _Reader(io.RawIOBase):
    def __init__(self, sock: _Socket) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._sock.recv_into(buffer)


def _why(answer: bytes) -> str:
    """Return Triton's reason; of another kind of answer, what tritonclient says then."""
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, LookupError, TypeError):
        text = answer[:200].decode(errors="replace")
        return f"an exception occurred in the client while decoding the response: {text!r}"

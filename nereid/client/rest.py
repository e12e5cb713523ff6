"""A KServe v2 client over HTTP, for asyncio and for blocking use."""

import asyncio
import http.client
import json
import os
import socket
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar
from urllib.parse import quote

from tritonclient.utils import InferenceServerException

from nereid.base.http_connection import HttpConnectionPool, HttpResponse
from nereid.client.request import NO_HEADERS, Headers, HttpInput
from nereid.client.result_kind import HttpResult

JSON_LENGTH_HEADER = "Inference-Header-Content-Length"
_JSON_LENGTH_HEADER = JSON_LENGTH_HEADER.lower().encode()


Read = Callable[[HttpResponse], Any]


class RestClient:
    """Asyncio client for one event loop, whose tasks share its connections.

    Methods return awaitables. These raise InferenceServerException with the server's message, HTTPException
    for a malformed response, or the errors of `HttpConnection`.

    Args:
        url: server address, HOST:PORT or `unix:PATH`.
    """

    def __init__(self, url: str) -> None:
        self.connections = HttpConnectionPool(url)

    async def close(self) -> None:
        """Close all connections; requests in flight fail."""
        self.connections.close()

    def infer(
        self,
        model: str,
        headers: Headers,
        *,
        inputs: Sequence[HttpInput],
        outputs: Sequence[Mapping[str, Any]],
        request_id: str,
        timeout: int,
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

        def read(response: HttpResponse) -> Any:
            json_size = json_size_of(response.headers.get(_JSON_LENGTH_HEADER))
            result = HttpResult(response.body, json_size)
            response_id = result.get_response().get("id", request_id)
            if response_id != request_id:
                raise http.client.HTTPException(
                    f"expected the response to request {request_id!r}, got that to {response_id!r}"
                )
            return result

        return self._send("POST", path, {**headers, **length}, body, read)

    def get_model_metadata(self, model: str, headers: Headers = NO_HEADERS) -> Any:
        """Return a model's metadata as a mapping."""
        return self._get_json(f"models/{quote(model)}", headers)

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

    def get_system_shared_memory_status(self, headers: Headers = NO_HEADERS) -> Any:
        """Return a list of the registered system shared memory regions."""
        return self._get_json("systemsharedmemory/status", headers)

    def _change_region(self, path: str, fields: Mapping[str, Any] = {}, headers: Headers = NO_HEADERS) -> Any:
        body = [json.dumps(fields).encode()] if fields else []
        return self._send("POST", path, headers, body)

    def _get_json(self, path: str, headers: Headers) -> Any:
        return self._send("GET", path, headers, read=lambda response: json.loads(response.body))

    async def _send(
        self,
        method: str,
        path: str,
        headers: Headers,
        body: Sequence[bytes] = (),
        read: Read = lambda response: None,
    ) -> Any:
        """Send a request to a path below `/v2/`, and return what `read` makes of a successful response."""
        lines = ((name.encode(), value.encode()) for name, value in headers.items())
        head = self.connections.build_head(method, f"/v2/{path}", lines, sum(map(len, body)))
        async with self.connections.acquire() as connection:
            response = await connection.send([head, *filter(None, body)])
            if response.status == http.client.OK:
                # A malformed response, or one to another request, closes the connection.
                return read(response)
        raise failure_of(response.status, response.body)


class BlockingRestClient:
    """Runs the methods of `RestClient` in the background loop; safe to use from several threads.

    A thread that uses it may run an event loop of its own, as in Jupyter.

    Args:
        url: as for `RestClient`.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        # By process: a forked process does not use its parent's connections.
        self._clients: dict[int, RestClient] = {}
        self._close_connections = weakref.finalize(self, _close, self._clients, self._tasks)

    def call(self, name: str, timeout_s: float, *args: Any, **options: Any) -> Any:
        """Return the result of the method `name`.

        Raises:
            RuntimeError: the client is closed.
        """
        if self._is_closed:
            raise RuntimeError
        client = self._clients.setdefault(os.getpid(), RestClient(self._url))

        async def run() -> Any:
            async with asyncio.timeout(timeout_s):
                return await getattr(client, name)(*args, **options)

        try:
            return background_loop().run(run(), self._tasks)
        except asyncio.CancelledError:
            raise RuntimeError from None

    def close(self) -> None:
        """Close all connections; requests in flight fail."""
        self._is_closed = True
        self._close_connections()


def _close(clients: Mapping[int, RestClient], tasks: Collection[asyncio.Task[Any]]) -> None:
    if (client := clients.get(os.getpid())) is None:
        return

    def close(connections: HttpConnectionPool) -> None:
        for task in tasks:
            task.cancel()
        connections.close()

    background_loop().call_soon_threadsafe(close, client.connections)


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


Value = TypeVar("Value")
# By process, because a forked process does not inherit its parent's threads.
_LOOPS: dict[int, "BackgroundLoop"] = {}


class BackgroundLoop(asyncio.SelectorEventLoop):
    """Runs coroutines for other threads, which may run event loops of their own."""

    def run(self, coroutine: Coroutine[Any, Any, Value], tasks: set[asyncio.Task[Any]]) -> Value:
        """Return the result of a coroutine; cancel it if the calling thread is interrupted.

        `asyncio.run_coroutine_threadsafe` would leave a cycle that keeps the result, or the request that
        failed, until the collector runs.

        Args:
            tasks: includes the coroutine's task while it runs; changed only in the loop.

        Raises:
            CancelledError: the task was cancelled.
        """
        ended: SimpleQueue[asyncio.Task[Value]] = SimpleQueue()
        task: asyncio.Task[Value] | None = None

        def start() -> None:
            nonlocal task
            tasks.add(task := self.create_task(coroutine))
            task.add_done_callback(tasks.discard)
            task.add_done_callback(ended.put)

        self.call_soon_threadsafe(start)
        try:
            ended.get()
        except BaseException:
            self.call_soon_threadsafe(lambda: task and task.cancel())
            raise
        assert task
        return task.result()

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        """Return the result of `socket.getaddrinfo`, run in a daemon thread.

        A thread of asyncio's executor delays the exit of the process, and cannot start during it.
        """
        addresses: Future[Any] = Future()
        addresses.set_running_or_notify_cancel()  # so that a lookup may end after its caller has given up

        def look_up() -> None:
            try:
                addresses.set_result(socket.getaddrinfo(host, port, family, type, proto, flags))
            except Exception as error:
                addresses.set_exception(error)

        threading.Thread(target=look_up, daemon=True).start()
        return await asyncio.wrap_future(addresses, loop=self)


def background_loop() -> BackgroundLoop:
    """Return the running loop of this process."""
    if (process := os.getpid()) not in _LOOPS:
        loop = BackgroundLoop()
        if _LOOPS.setdefault(process, loop) is loop:  # unless another thread was faster
            threading.Thread(target=loop.run_forever, daemon=True).start()
        else:
            loop.close()
    return _LOOPS[process]

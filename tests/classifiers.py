"""Clients of both kinds behind one blocking interface, and a server with scripted responses."""

import asyncio
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np

from nereid.base.assets import COFFEE
from nereid.tasks.classify.client import AsyncClassifier, Classifier

CLASSIFIERS = (Classifier, AsyncClassifier)
WAYS = [(way, protocol) for way in ("sync", "async") for protocol in ("http", "grpc")]


class Blocking:
    def __init__(self, client: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            async def run() -> Any:
                return await getattr(self._client, name)(*args, **options)

            return self._runner.run(run())

        def stream(*args: Any, **options: Any) -> Iterator[Any]:
            outcomes = getattr(self._client, name)(*args, **options)

            async def run() -> Any:
                return await anext(outcomes, None)

            return iter(lambda: self._runner.run(run()), None)

        return stream if name.endswith("_many") else call


@contextmanager
def opened(way: str, url: str, *args: Any, kinds: Any = CLASSIFIERS, **options: Any) -> Iterator[Any]:
    """Yield a client, by default a classifier; `way` is `sync` or `async`."""
    if way == "sync":
        with kinds[0](url, *args, **options) as client:
            yield client
        return
    blocking = Blocking(kinds[1](url, *args, **options))
    try:
        yield blocking
    finally:
        blocking.close()
        blocking._runner.close()


def check_bytes_are_sent(classifier: Any, caplog: Any, reason: str) -> None:
    answers = [classifier.classify(COFFEE.read_bytes()) for _ in range(3)]

    assert {answer.labels[0].name for answer in answers} == {"espresso"}
    assert {answer.timings.attempts for answer in answers} == {1}
    (message,) = [record.message for record in caplog.records if record.name == "nereid.client"]
    assert message.startswith("images are sent in requests, not in shared memory: ")
    assert reason in message


class Script:
    """Responses of a server to requests for inference, in order; the last one repeats.

    A step is one of: bytes of a response; a JSON document for a response with status 200; None, which closes
    the connection; a barrier, which closes the connections of all requests that reach it together; "silence",
    which sends nothing.

    Single bytes follow a response every `trickle_s` unless that is 0. `read` has the names of regions that
    the server refuses to release, and `refuses_regions` refuses all of them.
    """

    def __init__(self, *steps: Any, hangs_up: bool = False, trickle_s: float = 0.0) -> None:
        self.steps = list(steps)
        self.requests: list[tuple[str, bytes]] = []
        self.peers: list[Any] = []
        self.over = threading.Event()
        self.hangs_up, self.trickle_s = hangs_up, trickle_s
        self.read: set[str] = set()
        self.refuses_regions = False
        self.outputs: tuple[str, ...] = ("scores",)

    def next(self) -> Any:
        return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def bodies(self, word: str) -> list[bytes]:
        return [body for path, body in self.requests if path.endswith(word)]


def response(status: int, body: Any) -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.1 %d Any\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text)


def error(text: str, status: int = 400) -> bytes:
    return response(status, {"error": text})


def prediction_response(*rows: str, **about: str) -> bytes:
    texts = np.array([[row.encode()] for row in rows], object)
    return tensor_response({"model_name": "classify"} | about, scores=texts)


def tensor_response(about: dict[str, str] | None = None, /, **tensors: np.ndarray) -> bytes:
    """Return Triton's response: JSON with the fields of `about`, then the tensors."""
    body, json_bytes = tensor_body(about or {}, tensors)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nInference-Header-Content-Length: %d\r\n\r\n"
    return head % (len(body), json_bytes) + body


def tensor_body(about: dict[str, str], tensors: dict[str, np.ndarray]) -> tuple[bytes, int]:
    """Return the body of Triton's response, and the length of its JSON; texts are arrays of bytes."""
    outputs, parts = [], []
    for name, array in tensors.items():
        is_text = array.dtype == np.object_
        texts = (len(text).to_bytes(4, "little") + text for text in array.ravel()) if is_text else ()
        parts.append(b"".join(texts) if is_text else array.astype(np.float32).tobytes())
        output = {"name": name, "datatype": "BYTES" if is_text else "FP32", "shape": [*array.shape]}
        outputs.append(output | {"parameters": {"binary_data_size": len(parts[-1])}})
    text = json.dumps({"model_name": "read", "model_version": "1", "outputs": outputs} | about).encode()
    return text + b"".join(parts), len(text)


PREDICTION = prediction_response("0.95:967:espresso")


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        script: Script = self.server.script  # type: ignore[attr-defined]
        with suppress(OSError):
            while line := self.rfile.readline():
                headers = dict(
                    header.decode().lower().rstrip().split(": ", 1)
                    for header in iter(self.rfile.readline, b"\r\n")
                )
                body = self.rfile.read(int(headers.get("content-length", 0)))
                path = line.split()[1].decode()
                script.requests.append((path, body))
                if path.endswith("/infer"):
                    script.peers.append((self.client_address, body))
                    step = script.next()
                elif path.endswith("/status"):
                    step = []
                elif path.endswith("/unregister") and path.split("/")[-2] in script.read:
                    step = error("Cannot unregister shared memory region 'x', it is currently in use.", 500)
                elif path.endswith("/register") and script.refuses_regions:
                    step = error("Method not found!", 404)
                else:
                    step = {"name": "classify", "outputs": [{"name": name} for name in script.outputs]}
                if step == "silence":
                    script.over.wait()
                if isinstance(step, threading.Barrier):
                    step.wait()
                    return
                if step is None or step == "silence":
                    return
                self.wfile.write(step if isinstance(step, bytes) else response(200, step))
                while script.trickle_s and path.endswith("/infer"):
                    script.over.wait(script.trickle_s)
                    self.wfile.write(b" ")
                if script.hangs_up and path.endswith("/infer"):
                    return


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def serving(script: Script, host: str = "127.0.0.1") -> Iterator[str]:
    kind = type("Server", (_Server,), {"address_family": socket.AF_INET6}) if ":" in host else _Server
    with kind((host, 0), _Handler) as server:
        server.script = script
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"{f'[{host}]' if ':' in host else host}:{server.server_address[1]}"
        finally:
            script.over.set()
            server.shutdown()
            thread.join()


@contextmanager
def silent() -> Iterator[str]:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"

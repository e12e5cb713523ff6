"""Both classifiers behind one blocking interface, and a server that does what its script says."""

import asyncio
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from nereid.client.async_classifier import AsyncClassifier
from nereid.client.classifier import Classifier

WAYS = [(way, protocol) for way in ("sync", "async") for protocol in ("http", "grpc")]


class Blocking:
    """An `AsyncClassifier` with the interface of a `Classifier`."""

    def __init__(self, url: str, *args: Any, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._classifier = AsyncClassifier(url, *args, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            async def run() -> Any:
                return await getattr(self._classifier, name)(*args, **options)

            return self._runner.run(run())

        return call

    def classify_many(self, *args: Any, **options: Any) -> list[Any]:
        """Return all outcomes."""

        async def run() -> list[Any]:
            return [outcome async for outcome in self._classifier.classify_many(*args, **options)]

        return self._runner.run(run())


@contextmanager
def opened(way: str, url: str, *args: Any, **options: Any) -> Iterator[Any]:
    """Give a classifier of a way, `sync` or `async`."""
    if way == "sync":
        with Classifier(url, *args, **options) as classifier:
            yield classifier
        return
    blocking = Blocking(url, *args, **options)
    try:
        yield blocking
    finally:
        blocking.close()
        blocking._runner.close()


class Script:
    """What a server does with requests for inference, one after the other; the last of them for ever.

    Each is what it answers, as bytes or as the JSON of an answer with status 200; None closes the connection,
    a barrier that of all who come to it together, "silence" says nothing. A body comes `gap_s` after its
    head. After bytes there may follow a blank every `trickle_s`, or nothing any more: `hangs_up`. `calls`
    are the paths and bodies of all requests, `peers` the addresses and bodies of those for inference.
    Regions in `read` it does not let go of.
    """

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)
        self.calls: list[tuple[str, bytes]] = []
        self.peers: list[Any] = []
        self.over = threading.Event()
        self.gap_s = self.trickle_s = 0.0
        self.hangs_up = False
        self.read: set[str] = set()

    def next(self) -> Any:
        """Return the next step."""
        return self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]

    def asked(self, word: str) -> list[bytes]:
        """Return the bodies of the requests whose path ends with a word."""
        return [body for path, body in self.calls if path.endswith(word)]


def answer(status: int, body: Any) -> bytes:
    """Return an HTTP answer of JSON."""
    text = json.dumps(body).encode()
    return b"HTTP/1.1 %d Any\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text)


def error(text: str, status: int = 400) -> bytes:
    """Return an answer as Triton's, that a request failed."""
    return answer(status, {"error": text})


def answered(*rows: str, **about: str) -> bytes:
    """Return an answer with one class per image, as Triton's: JSON, in it `about`, then the tensor."""
    data = b"".join(len(row).to_bytes(4, "little") + row.encode() for row in rows)
    scores: dict[str, Any] = {"name": "scores", "datatype": "BYTES", "shape": [len(rows), 1]}
    scores["parameters"] = {"binary_data_size": len(data)}
    model = {"model_name": "classify", "model_version": "1", "outputs": [scores]}
    text = json.dumps(model | about).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nInference-Header-Content-Length: %d\r\n\r\n"
    return head % (len(text) + len(data), len(text)) + text + data


PREDICTION = answered("0.95:967:espresso")


class _Handler(socketserver.StreamRequestHandler):
    """A connection: answers each request as the script says."""

    def handle(self) -> None:
        """Answer until the caller or the script ends it."""
        script: Script = self.server.script  # type: ignore[attr-defined]
        with suppress(OSError):
            while line := self.rfile.readline():
                headers = dict(
                    header.decode().lower().rstrip().split(": ", 1)
                    for header in iter(self.rfile.readline, b"\r\n")
                )
                body = self.rfile.read(int(headers.get("content-length", 0)))
                path = line.split()[1].decode()
                script.calls.append((path, body))
                if path.endswith("/infer"):
                    script.peers.append((self.client_address, body))
                    step = script.next()
                elif path.endswith("/status"):
                    step = []
                elif path.endswith("/unregister") and path.split("/")[-2] in script.read:
                    step = error("Cannot unregister shared memory region 'x', it is currently in use.", 500)
                else:
                    step = {"name": "classify", "outputs": [{"name": "scores"}]}
                if step == "silence":
                    script.over.wait()
                if isinstance(step, threading.Barrier):
                    step.wait()
                    return
                if step is None or step == "silence":
                    return
                step = step if isinstance(step, bytes) else answer(200, step)
                head = step.find(b"\r\n\r\n") + 4 if script.gap_s else 0
                self.wfile.write(step[:head])
                script.over.wait(script.gap_s)
                self.wfile.write(step[head:])
                while script.trickle_s and path.endswith("/infer"):
                    script.over.wait(script.trickle_s)
                    self.wfile.write(b" ")
                if script.hangs_up and path.endswith("/infer"):
                    return


class _Server(socketserver.ThreadingTCPServer):
    """Gives every connection a thread."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128


@contextmanager
def serving(script: Script, host: str = "127.0.0.1") -> Iterator[str]:
    """Serve a script over HTTP; gives HOST:PORT."""
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
    """Give HOST:PORT of what takes connections and says nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"

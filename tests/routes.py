"""Routes for tests: tiny models behind `ab_router`, clients of both protocols, and metrics."""

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tritonclient.utils import InferenceServerException

from nereid.backends.triton import stub_processes
from nereid.backends.triton.metrics import ROUTE_PREFIX
from nereid.base import prometheus_text
from nereid.base.prometheus_text import MetricSamples
from nereid.server.embedded_server import EmbeddedServer
from tests.networks import ONE_INSTANCE, client_input, connect, serve, store, tensor, written

# Far longer than any wait should take.
WATCHDOG_S = 180
# Metrics are sent every half second.
METRIC_S = 10
CLASSES = 3
X = np.array([[0, 5, 1]], np.float32)
TENSORS = (
    "max_batch_size: 8\n"
    + tensor("input", "x", "FP32", [CLASSES])
    + tensor("output", "scores", "FP32", [CLASSES], 'label_filename: "labels.txt"')
)
LABELS = "left\nmiddle\nright\n"
ROUTE_OUTPUTS = ("variant", "version", "route_reason")
NETWORK = ONE_INSTANCE + TENSORS
ALL_VERSIONS = "version_policy { all {} }\n"
# A model that follows its file `NAME.orders.json`, next to its folder; one thread per request.
PUPPET = """
import json
import random
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"])
        self.orders = folder.parent / f"{folder.name}.orders.json"
        self.waiting = folder.parent / f"{folder.name}.waiting"
        self.lock = threading.Lock()
        self.count = 0

    def execute(self, requests):
        for request in requests:
            thread = threading.Thread(target=self.answer, args=[request])
            thread.start()
            if self.read().get("blocks"):
                thread.join()

    def answer(self, request):
        orders = self.read()
        if orders.get("hold"):
            self.wait()
        time.sleep(orders.get("delay_ms", 0) * random.uniform(0.7, 1.3) / 1000)
        if random.random() < orders.get("error_share", 1) and orders.get("error"):
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(orders["error"]))
        else:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            scores = x + np.float32(orders.get("add", 0))
            response = pb_utils.InferenceResponse([pb_utils.Tensor("scores", scores)])
        request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def wait(self):
        self.add(1)
        while self.read().get("hold"):
            time.sleep(0.02)
        self.add(-1)

    def add(self, number):
        with self.lock:
            self.count += number
            self.waiting.write_text(str(self.count))

    def read(self):
        return json.loads(self.orders.read_text()) if self.orders.exists() else {}
"""


def adding(number: float) -> onnx.ModelProto:
    io = f"(float[batch,{CLASSES}] x) => (float[batch,{CLASSES}] scores)"
    return written(f"{io} {{ scores = Add(x, number) }}", number=np.array(number, np.float32))


def store_adding(repository: Path, name: str, *numbers: float, config: str = NETWORK + ALL_VERSIONS) -> None:
    """Store a model whose version N adds the N-th number."""
    for version, number in enumerate(numbers, start=1):
        store(repository, name, adding(number), config, version)
    (repository / name / "labels.txt").write_text(LABELS)


def store_puppet(repository: Path, name: str, **orders: Any) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(PUPPET)
    (folder.parent / "labels.txt").write_text(LABELS)
    (folder.parent / "config.pbtxt").write_text(f'backend: "python"\n{NETWORK}')
    order(repository, name, **orders)


def order(repository: Path, name: str, **orders: Any) -> None:
    """Set the behaviour of a puppet.

    `add` is added to x; `hold` holds all responses until it is false; `blocks` processes one request after
    the other; `error` is a message to fail with, and `error_share` the part of the requests that get it
    (default: all); `delay_ms` is the time until a response.
    """
    replace(repository / f"{name}.orders.json", json.dumps(orders).encode())


def waiting(repository: Path, name: str) -> int:
    path = repository / f"{name}.waiting"
    return int(path.read_text() or 0) if path.exists() else 0


def store_ensemble(repository: Path, name: str, model: str, version: int) -> None:
    step = (
        f'ensemble_scheduling {{ step {{ model_name: "{model}" model_version: {version} '
        'input_map { key: "x" value: "x" } output_map { key: "scores" value: "scores" } } }\n'
    )
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "labels.txt").write_text(LABELS)
    (folder / "config.pbtxt").write_text(f'platform: "ensemble"\n{TENSORS}{step}')


def store_router(
    repository: Path, name: str, route: Mapping[str, Any] | None = None, config: str = NETWORK
) -> None:
    """Store a route's model, and its route file `NAME.route.json` if a route is given.

    `config` has the tensors and settings that the route shares with its variants.
    """
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "labels.txt").write_text(LABELS)
    added = "".join(tensor("output", output, "STRING", [1]) for output in ROUTE_OUTPUTS)
    file = f'parameters {{ key: "route" value {{ string_value: "{name}.route.json" }} }}\n'
    (folder / "config.pbtxt").write_text(f'backend: "ab_router"\n{config}{added}{file}')
    if route:
        replace(repository / f"{name}.route.json", json.dumps(route).encode())


def variant(name: str, model: str, weight: float = 0, version: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "version": version, "weight": weight, **more}


def publish_config(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file of a mounted ConfigMap as the kubelet does: the link `..data` is swapped."""
    folder = path.parent
    data = folder / f"..{time.monotonic_ns()}"
    data.mkdir(parents=True)
    (data / path.name).write_text(json.dumps(content))
    (folder / "..new").symlink_to(data.name)
    (folder / "..new").replace(folder / "..data")
    if not path.is_symlink():
        path.symlink_to(f"..data/{path.name}")


def document(*variants: Mapping[str, Any], default: str = "", **more: Any) -> dict[str, Any]:
    """Return a route file's content; the default is the first variant if none is named."""
    salts = {"variants": "tests", "shadows": "tests' shadows"}
    return {"variants": list(variants), "default": default or variants[0]["name"], "salts": salts, **more}


def replace(path: Path, content: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


def wait_until(is_true: Callable[[], Any], event: str = "condition", timeout_s: float = WATCHDOG_S) -> Any:
    """Wait for a condition and return its true value; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (outcome := is_true()):
        assert time.monotonic() < deadline, f"{event}: not within {timeout_s} s"
        time.sleep(0.02)
    return outcome


@dataclass(frozen=True, slots=True)
class RouteResponse:
    """Response of a route; `origin` is the variant, the version and the reason."""

    scores: np.ndarray
    origin: tuple[str, ...]

    @property
    def variant(self) -> str:
        return self.origin[0]

    @property
    def reason(self) -> str:
        return self.origin[2]

    @property
    def added(self) -> float:
        return float(self.scores[0, 0] - X[0, 0])


class RouteServer:
    def __init__(self, server: EmbeddedServer, log: list[str]) -> None:
        self.server, self.log = server, log
        self.repository = server.options.repository
        self.grpc = connect(server)
        self._local = threading.local()
        self._opened = [self.grpc]
        self._generations = itertools.count(1)

    def close(self) -> None:
        for client in self._opened:
            client.close()

    def client(self, protocol: str) -> Any:
        """Return a client for this thread; an HTTP client belongs to the thread that created it."""
        if protocol == "grpc":
            return self.grpc
        if not hasattr(self._local, "http"):
            self._local.http = connect(self.server, "http")
            self._opened.append(self._local.http)
        return self._local.http

    def infer(self, model: str, protocol: str = "grpc", outputs: Sequence[Any] = (), **options: Any) -> Any:
        """Send X, or `x`; returns the client's own result."""
        # The HTTP client adds its own to the headers it is given.
        options["headers"] = dict(options.get("headers", {}))
        tensors = [client_input(protocol, "x", options.pop("x", X))]
        return self.client(protocol).infer(model, tensors, outputs=outputs or None, **options)

    def send(self, model: str, protocol: str = "grpc", **options: Any) -> RouteResponse:
        result = self.infer(model, protocol, **options)
        origin = tuple(result.as_numpy(name).ravel()[0].decode() for name in ROUTE_OUTPUTS)
        return RouteResponse(result.as_numpy("scores"), origin)

    def refusal(self, model: str, protocol: str = "grpc", **options: Any) -> tuple[str, str]:
        """Send a request that must fail; returns the protocol's status, and the message."""
        with pytest.raises(InferenceServerException) as caught:
            self.send(model, protocol, **options)
        return str(caught.value.status()), caught.value.message()

    def use(self, model: str, content: dict[str, Any], timeout_s: float = WATCHDOG_S) -> dict[str, Any]:
        """Make `content` the route of `model` under the next generation, and wait until it is in use."""
        content = content | {"generation": next(self._generations)}
        line, seen = f"route {model}: generation {content['generation']}, ", len(self.log)
        replace(self.path(model), json.dumps(content).encode())
        wait_until(lambda: self.logged(line) or self.logged("is refused", seen), f"'{line}'", timeout_s)
        assert self.logged(line), self.logged("is refused", seen)
        return content

    def path(self, model: str) -> Path:
        return self.repository / f"{model}.route.json"

    def logged(self, text: str, since: int = 0) -> list[str]:
        return [line for line in self.log[since:] if text in line]

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics().total(ROUTE_PREFIX + name, labels)

    def metrics(self) -> MetricSamples:
        page = prometheus_text.fetch(f"127.0.0.1:{self.server.options.ports.metrics}", WATCHDOG_S)
        return MetricSamples.parse(page, (ROUTE_PREFIX,))

    def wait_metric(self, expected: float, name: str, **labels: str) -> None:
        """Wait until a metric has a value; it is sent some time after the response."""
        seen = []

        def is_there() -> bool:
            seen.append(self.metric(name, **labels))
            return seen[-1] == expected

        try:
            wait_until(is_there, timeout_s=METRIC_S)
        except AssertionError:
            pytest.fail(f"{name} {labels}: expected {expected}, got {seen[-1]} after {METRIC_S} s")

    def stubs(self, model: str) -> list[int]:
        stubs = stub_processes.find(self.server.pid, self.repository)
        return [stub.process.pid for stub in stubs if stub.model == model]

    def kill(self, model: str) -> None:
        killed = self.stubs(model)
        assert killed, f"no process of '{model}'"
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    def repair(self, model: str) -> None:
        """Load a model again, as needed after its process died."""
        later = time.time_ns() + 5 * 10**9
        for version in (self.repository / model).glob("[0-9]*"):
            for path in (version, *version.iterdir()):
                os.utime(path, ns=(later, later))
        self.grpc.load_model(model)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request of a `Load`: its begin and end (monotonic seconds), and its response or error."""

    begin: float
    end: float
    answer: RouteResponse | Exception

    @property
    def is_failed(self) -> bool:
        return isinstance(self.answer, Exception)


class Load:
    """Sends requests to a route over both protocols while the context lasts, one at a time per caller."""

    def __init__(self, served: RouteServer, model: str, callers: int) -> None:
        self._served, self._model = served, model
        self._is_over = threading.Event()
        ways = [("http", "grpc")[number % 2] for number in range(callers)]
        self._threads = [threading.Thread(target=self._send_all, args=[way]) for way in ways]
        self.outcomes: list[Outcome] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        self.wait_for(lambda outcome: True, len(self._threads))
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(WATCHDOG_S)

    def begun_after(self, moment: float, until: float = float("inf")) -> list[Outcome]:
        return [outcome for outcome in list(self.outcomes) if moment <= outcome.begin < until]

    def wait_for(self, is_wanted: Callable[[Outcome], bool], count: int = 1, since: float = 0) -> None:
        wait_until(lambda: sum(map(is_wanted, self.begun_after(since))) >= count, f"{count} wanted outcomes")

    def _send_all(self, protocol: str) -> None:
        while not self._is_over.is_set():
            begin = time.monotonic()
            try:
                answer: RouteResponse | Exception = self._served.send(self._model, protocol)
            except Exception as error:
                answer = error
            self.outcomes.append(Outcome(begin, time.monotonic(), answer))


def answered_by(name: str) -> Callable[[Outcome], bool]:
    return lambda outcome: isinstance(outcome.answer, RouteResponse) and outcome.answer.variant == name


@contextmanager
def serve_routes(repository: Path, run_dir: Path, *flags: str) -> Iterator[RouteServer]:
    """Run a server of `repository` whose log is kept; `flags` are Triton's.

    A server that has exited on its own is reported with the end of its log.
    """
    log: list[str] = []
    # After a failed load this core waits for one more model than there is.
    with serve(repository, run_dir, "--exit-timeout-secs=3", *flags, log=log.append) as running:
        served = RouteServer(running, log)
        try:
            yield served
        finally:
            served.close()
            if (status := running.poll()) is not None:
                print(f"the server has ended with status {status}:", *log[-30:], sep="\n", file=sys.stderr)

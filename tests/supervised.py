"""A real `nereid serve` for tests: a process of its own, with a health port."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nereid.backends.triton import stub_processes
from nereid.base import prometheus_text
from nereid.base.assets import COFFEE
from nereid.base.prometheus_text import MetricSamples
from nereid.server import run_dir
from nereid.tasks.classify.client import Classifier
from tests.commands import captured
from tests.networks import CLIENTS, client_input, tensor
from tests.routes import WATCHDOG_S, wait_until

NEREID = str(Path(sys.executable).with_name("nereid"))
ANY_PORTS = [word for name in ("http", "grpc", "metrics", "health") for word in (f"--{name}-port", "0")]
INSTANCES = 2
IMAGE_TO_SCORES = (
    "max_batch_size: 1\n"
    + tensor("input", "image", "STRING", [1])
    + tensor("output", "scores", "FP32", [1], 'label_filename: "labels.txt"')
)
# A model that takes an image and returns the number that `NAME.number`, in the repository, had at its load.
# It holds an image that is the word `hold` while the file `held` exists.
EYES = """
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"])
        number = (folder.parent / f"{folder.name}.number").read_text()
        self.held = folder.parent / "held"
        self.number = float(number) + float(args["model_version"])

    def execute(self, requests):
        time.sleep(SLEEP_S)
        image = pb_utils.get_input_tensor_by_name(requests[0], "image").as_numpy().item()
        while image == b"hold" and self.held.exists():
            time.sleep(0.05)
        scores = np.full((1, 1), self.number, np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("scores", scores)]) for _ in requests]
"""


def store_eyes(
    repository: Path, name: str, number: float, sleep_s: float = 0, instances: int = INSTANCES, more: str = ""
) -> None:
    """Store a model that returns `number` plus its version for any image; `more` is added to its config."""
    (folder := repository / name / "1").mkdir(parents=True)
    (folder / "model.py").write_text(EYES.replace("SLEEP_S", str(sleep_s)))
    (repository / f"{name}.number").write_text(str(number))
    (repository / name / "labels.txt").write_text("only\n")
    (repository / name / "config.pbtxt").write_text(
        'backend: "python"\nversion_policy { all {} }\n'
        f"instance_group {{ kind: KIND_CPU count: {instances} }}\n{IMAGE_TO_SCORES}{more}"
    )


def nereid(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return captured([NEREID, *words], env=os.environ | environment)


class Served:
    def __init__(self, process: subprocess.Popen, repository: Path, base: Path, folder: Path) -> None:
        self.process, self.repository = process, repository
        self.base, self._folder = base, folder
        self.ports = json.loads((folder / "ready").read_text())

    @property
    def server_info(self) -> run_dir.ServerInfo:
        server_info: run_dir.ServerInfo
        server_info = wait_until(lambda: run_dir.find(self.base, self.repository), "server.json")
        return server_info

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    @property
    def access_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def access_line(self, trace: str) -> dict[str, Any]:
        """Wait for the only line of a trace in the access log."""

        def lines() -> list[dict[str, Any]]:
            return [line for line in self.access_lines if line["trace_id"] == trace]

        (line,) = wait_until(lines, "a line")
        return dict(line)

    @property
    def environment(self) -> dict[str, str]:
        variables = {"XDG_RUNTIME_DIR": str(self._folder), "NEREID_REPOSITORY": str(self.repository)}
        return os.environ | variables

    def nereid(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return nereid(*words, **self.environment)

    def run(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run a command that must succeed."""
        done = self.nereid(*words)
        assert done.returncode == 0, done.stderr
        return done

    def stubs(self, model: str) -> list[stub_processes.Stub]:
        return [
            stub for stub in stub_processes.find(self.server_info.pid, self.repository) if stub.model == model
        ]

    def page(self, path: str) -> tuple[int, str]:
        return prometheus_text.get(f"127.0.0.1:{self.ports['health']}", path, WATCHDOG_S)

    def triton_page(self) -> str:
        return prometheus_text.fetch(self.server_info.url("metrics"), WATCHDOG_S)

    def triton_metric(self, name: str, **labels: str) -> float:
        return MetricSamples.parse(self.triton_page()).total(name, labels)

    def is_ready(self) -> bool:
        return self.page("/readyz")[0] == 200

    def why_not_ready(self) -> str:
        return str(wait_until(lambda: not self.is_ready() and self.page("/readyz")[1], "not ready"))

    def metric(self, name: str, **labels: str) -> float:
        return MetricSamples.parse(self.page("/metrics")[1]).total(f"nereid_supervisor_{name}", labels)

    def numbers(self, model: str, count: int = 4, protocol: Any = "http") -> list[float]:
        with Classifier(f"127.0.0.1:{self.ports[protocol]}", protocol, model) as classifier:
            return [classifier.classify(COFFEE, top_k=1).labels[0].score for _ in range(count)]


class Calls:
    """Requests to a model, each with its begin (monotonic seconds), and its result or error message."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[float, Any]] = []

    def since(self, moment: float = 0) -> list[Any]:
        return [outcome for begin, outcome in list(self.outcomes) if begin >= moment]

    def count(self, outcome: Any) -> int:
        return self.since().count(outcome)


def image_input(protocol: str, *images: bytes) -> Any:
    """Return a batch of images as an input, by default of the sample photo."""
    rows = [[image] for image in images or [COFFEE.read_bytes()]]
    return client_input(protocol, "image", np.array(rows, object))


@contextmanager
def calling(
    served: Served, model: str, callers: int, inputs: Callable[[str], Any] = image_input
) -> Iterator[Calls]:
    """Send requests over both protocols with NVIDIA's clients, which repeat none, while the context lasts."""
    calls, over = Calls(), threading.Event()

    def call(protocol: str) -> None:
        image = inputs(protocol)
        options = {"client_timeout": WATCHDOG_S} if protocol == "grpc" else {}
        with CLIENTS[protocol].InferenceServerClient(f"127.0.0.1:{served.ports[protocol]}") as client:
            while not over.is_set():
                begin = time.monotonic()
                try:
                    result = client.infer(model, [image], **options)
                    outcome: Any = float(result.as_numpy("scores").max())
                except Exception as error:  # judged by the test
                    outcome = str(error)
                    over.wait(0.05)
                calls.outcomes.append((begin, outcome))

    with ThreadPoolExecutor(callers) as pool:
        pending = [pool.submit(call, ("http", "grpc")[number % 2]) for number in range(callers)]
        try:
            yield calls
        finally:
            over.set()
    for future in pending:
        future.result()


@contextmanager
def serving(repository: Path, folder: Path, *words: str, launcher: Sequence[str] = ()) -> Iterator[Served]:
    """Run `nereid serve` with a health port, until ready; killed afterwards if it still runs.

    `launcher` is a command that becomes `nereid serve`, in an environment of its own.
    """
    folder.mkdir()
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
    with (folder / "log").open("w") as log, (folder / "ready").open("w") as ready:
        process = subprocess.Popen(
            [*launcher, NEREID, "serve", "--repository", str(repository), *ANY_PORTS, *words],
            env=environment,
            stdout=ready,
            stderr=log,
        )
    try:
        wait_until(lambda: (folder / "ready").read_text().endswith("\n") or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        yield Served(process, repository, run_dir.root(environment), folder)
    finally:
        process.kill()  # takes the server along
        process.wait()


def gateway_of(served: Served, log: Path, *words: str) -> AbstractContextManager[dict[str, int]]:
    """Run `nereid gateway` in front of a served repository; gives its ports."""
    return running_gateway(
        log, "--repository", str(served.repository), *words, environment=served.environment
    )


@contextmanager
def running_gateway(
    log: Path, *words: str, environment: Mapping[str, str] = os.environ
) -> Iterator[dict[str, int]]:
    with announcing([NEREID, "gateway", "--port", "0", *words], log, env=environment) as (_, ports):
        yield ports


@contextmanager
def gateway(log: Path, *words: str) -> Iterator[tuple[subprocess.Popen, str]]:
    with announcing([NEREID, "gateway", "--port", "0", *words], log) as (process, ports):
        yield process, f"http://127.0.0.1:{ports['http']}"


@contextmanager
def announcing(
    words: Sequence[str], log: Path, **options: Any
) -> Iterator[tuple[subprocess.Popen, dict[str, int]]]:
    """Run a program whose first line has its ports as JSON; killed afterwards."""
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=output, text=True, **options)
    try:
        assert process.stdout
        ready = process.stdout.readline()
        assert ready, log.read_text()
        yield process, json.loads(ready)
    finally:
        process.kill()
        process.communicate()

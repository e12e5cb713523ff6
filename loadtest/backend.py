"""What the `onnxruntime` backend adds to `InferenceSession.run`, by Triton's own statistics and for a client.

Beside it stands the least that any Python model costs on this server, `loadtest/least.py`.

python -m loadtest.backend [--rounds 15] [--seconds 2] [--record backend]
"""

import os
import shutil
import statistics
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc

from loadtest import record
from nereid import assets
from nereid.config.model_config import ModelConfig
from nereid.inference.session import Session
from nereid.server.command_line import ServerOptions
from nereid.server.embedded_server import EmbeddedServer
from nereid.server.ports import Ports, free_ports

MODEL, LEAST, VERSION = "efficientnet_lite0", "least", "1"
# Model and batch size of each column.
COLUMNS = ((MODEL, 1), (LEAST, 1), (MODEL, 8))
# The backend hands its metrics on twice a second.
METRICS_LAG_S = 1.0
STEPS = ("compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of one request: in process, inside the server, and as its client sees it.

    `run` is `InferenceSession.run` inside the server; `backend` is what Triton's statistics count beside it:
    compute_input, compute_output, and the rest of compute_infer.
    """

    in_process: float
    run: float
    compute_input: float
    compute_infer: float
    compute_output: float
    client: float

    @property
    def backend(self) -> float:
        """What the backend adds to the run."""
        return self.compute_input + self.compute_infer + self.compute_output - self.run


def measure(session: Session, client: "Client", model: str, batch: int, seconds: float) -> Cost:
    """Run for `seconds` in process, then for as long through the server."""
    inputs = np.random.default_rng(0).standard_normal((batch, 3, 224, 224), np.float32)
    in_process = _per_call(lambda: session.run({"input": inputs}, ["scores"]), seconds)
    before = client.counters(model)
    latency = _per_call(lambda: client.infer(model, inputs), seconds)
    after = client.counters(model)
    count = after["count"] - before["count"]
    spent = {name: (after[name] - before[name]) / count * 1e3 for name in ("run", *STEPS)}
    return Cost(in_process=in_process, client=latency, **spent)


class Client:
    """One gRPC connection, and the server's counters in seconds since its start."""

    def __init__(self, ports: Ports) -> None:
        self._triton = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}")
        self._ports = ports

    def infer(self, model: str, inputs: np.ndarray) -> None:
        """Send one request with a tensor and wait for its answer."""
        tensor = tritonclient.grpc.InferInput("input", list(inputs.shape), "FP32")
        tensor.set_data_from_numpy(inputs)
        self._triton.infer(model, [tensor], VERSION)

    def counters(self, model: str) -> dict[str, float]:
        """Return executions, seconds inside `InferenceSession.run`, and Triton's compute steps."""
        time.sleep(METRICS_LAG_S)
        stats = self._triton.get_inference_statistics(model, VERSION, as_json=True)["model_stats"][0]
        found = {step: int(stats["inference_stats"][step].get("ns", 0)) / 1e9 for step in STEPS}
        return found | {
            "run": run_counters(self._ports, model)["sum"],
            "count": int(stats.get("execution_count", 0)),
        }


def store(repository: Path) -> Path:
    """Write a repository of the network and of its rival, which runs the same file."""
    network = shutil.copytree(assets.REPOSITORY / MODEL, repository / MODEL)
    rival = repository / LEAST / VERSION
    rival.mkdir(parents=True)
    shutil.copy(network / VERSION / "model.onnx", rival)
    shutil.copy(Path(__file__).with_name("least.py"), rival / "model.py")
    config = (network / "config.pbtxt").read_text().replace('"onnxruntime"', '"python"')
    config = config.replace(MODEL, LEAST).replace("versions: [ 1, 2 ]", "versions: [ 1 ]")
    (rival.parent / "config.pbtxt").write_text(config.replace('label_filename: "labels.txt"', ""))
    return repository


def run_counters(ports: Ports, model: str) -> dict[str, float]:
    """Return `sum`, in seconds, and `count` of the runs of `model`, all versions together."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ports.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    return {
        each: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(prefix))
        for each in ("sum", "count")
        if (prefix := f'nereid_onnxruntime_run_seconds_{each}{{model="{model}",')
    }


def _per_call(call: Any, seconds: float) -> float:
    spent, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        call()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent) * 1e3


def summary(costs: list[Cost]) -> dict[str, float]:
    """Return medians over rounds, and the two figures that are held to a target."""
    medians = {name: statistics.median(asdict(c)[name] for c in costs) for name in asdict(costs[0])}
    medians["backend"] = statistics.median(cost.backend for cost in costs)
    medians["backend_of_run"] = statistics.median(cost.backend / cost.run for cost in costs)
    medians["client_beside_run"] = statistics.median(cost.client - cost.run for cost in costs)
    return {name: round(value, 4) for name, value in medians.items()}


def markdown(result: dict[str, dict[str, float]]) -> str:
    """Render a record's rows as the table of docs/onnxruntime_backend.md; a test compares the two."""
    columns = result.values()
    return record.markdown(["", *result], ([n, *(c[n] for c in columns)] for n in next(iter(columns))))


def main() -> None:
    """Measure both batch sizes in turn, print, record."""
    args = record.parsed(record.parser(__doc__, rounds=15, seconds=2.0))
    session = Session.from_config(ModelConfig.from_file(assets.REPOSITORY / MODEL, int(VERSION)))
    costs: dict[tuple[str, int], list[Cost]] = {column: [] for column in COLUMNS}
    with tempfile.TemporaryDirectory() as folder:
        options = ServerOptions(store(Path(folder) / "models"), ports=Ports(*free_ports(3)))
        with EmbeddedServer(options, Path(folder), os.environ):
            client = Client(options.ports)
            for _ in range(args.rounds):
                for model, batch in COLUMNS:
                    costs[model, batch].append(measure(session, client, model, batch, args.seconds))
    result = {f"{model}, batch {batch}": summary(found) for (model, batch), found in costs.items()}
    print(markdown(result))
    args.record.write({"rows": result})


if __name__ == "__main__":
    record.end(main)

"""The cost of the `onnxruntime` backend in addition to `InferenceSession.run`, by Triton's statistics.

The baseline is a minimal Python model on the same server, `loadtest/baseline_model.py`.

python -m loadtest.backend [--rounds 15] [--seconds 2] [--record backend]
"""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tritonclient.grpc

from loadtest import record, servers
from nereid import assets, metrics_page
from nereid.config.model_config import ModelConfig
from nereid.inference.session import Session
from nereid.server.command_line import DEFAULT_PROFILE
from nereid.server.ports import Ports

# The baseline is called `least` in the record.
MODEL, BASELINE, VERSION = "efficientnet_lite0", "least", "1"
# Model and batch size of each column.
COLUMNS = ((MODEL, 1), (BASELINE, 1), (MODEL, 8))
# The backend reports its metrics twice a second.
METRICS_DELAY_S = 1.0
STEPS = ("compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of one request: in process, inside the server, and for its client.

    `run` is `InferenceSession.run` inside the server; the others are Triton's statistics.
    """

    in_process: float
    run: float
    compute_input: float
    compute_infer: float
    compute_output: float
    client: float

    @property
    def backend(self) -> float:
        """The time of the backend without the run."""
        return self.compute_input + self.compute_infer + self.compute_output - self.run


class Client:
    """One gRPC connection, and the server's counters in seconds since its start."""

    def __init__(self, ports: Ports) -> None:
        self._triton = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}")
        self._ports = ports

    def infer(self, model: str, inputs: np.ndarray) -> None:
        """Send one request and wait for its response."""
        tensor = tritonclient.grpc.InferInput("input", list(inputs.shape), "FP32")
        tensor.set_data_from_numpy(inputs)
        self._triton.infer(model, [tensor], VERSION)

    def counters(self, model: str) -> dict[str, float]:
        """Return executions, seconds inside `InferenceSession.run`, and Triton's compute steps."""
        time.sleep(METRICS_DELAY_S)
        stats = self._triton.get_inference_statistics(model, VERSION, as_json=True)["model_stats"][0]
        found = {step: int(stats["inference_stats"][step].get("ns", 0)) / 1e9 for step in STEPS}
        run_s, _ = run_counters(self._ports, model)
        return found | {"run": run_s, "count": int(stats.get("execution_count", 0))}


def measure(session: Session, client: Client, model: str, batch: int, seconds: float) -> Cost:
    """Run the network in process, then through the server, each for a number of seconds."""
    inputs = np.random.default_rng(0).standard_normal((batch, 3, 224, 224), np.float32)
    in_process = _call_ms(lambda: session.run({"input": inputs}, ["scores"]), seconds)
    before = client.counters(model)
    latency = _call_ms(lambda: client.infer(model, inputs), seconds)
    after = client.counters(model)
    count = after["count"] - before["count"]
    spent = {name: (after[name] - before[name]) / count * 1e3 for name in ("run", *STEPS)}
    return Cost(in_process=in_process, client=latency, **spent)


def write_repository(repository: Path) -> Path:
    """Write a repository with the network and its baseline, which runs the same file."""
    network = shutil.copytree(assets.REPOSITORY / MODEL, repository / MODEL)
    baseline = repository / BASELINE / VERSION
    baseline.mkdir(parents=True)
    shutil.copy(network / VERSION / "model.onnx", baseline)
    shutil.copy(Path(__file__).with_name("baseline_model.py"), baseline / "model.py")
    config = (network / "config.pbtxt").read_text().replace('"onnxruntime"', '"python"')
    config = config.replace(MODEL, BASELINE).replace("versions: [ 1, 2 ]", "versions: [ 1 ]")
    (baseline.parent / "config.pbtxt").write_text(config.replace('label_filename: "labels.txt"', ""))
    return repository


def run_counters(ports: Ports, model: str) -> tuple[float, float]:
    """Return seconds and number of the runs of a model, all versions together."""
    samples = list(metrics_page.parse(metrics_page.fetch(f"127.0.0.1:{ports.metrics}", timeout_s=10)))
    seconds, count = (
        sum(
            each.value
            for each in samples
            if each.name == f"nereid_onnxruntime_run_seconds_{part}" and each.labels["model"] == model
        )
        for part in ("sum", "count")
    )
    return seconds, count


def _call_ms(call: Callable[[], object], seconds: float) -> float:
    spent, end = [], time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        call()
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent) * 1e3


def summary(costs: list[Cost]) -> dict[str, float]:
    """Return medians over rounds, and the two numbers that have a target."""
    medians = {name: statistics.median(asdict(c)[name] for c in costs) for name in asdict(costs[0])}
    medians["backend"] = statistics.median(cost.backend for cost in costs)
    medians["backend_of_run"] = statistics.median(cost.backend / cost.run for cost in costs)
    medians["client_beside_run"] = statistics.median(cost.client - cost.run for cost in costs)
    return {name: round(value, 4) for name, value in medians.items()}


def markdown(result: dict[str, dict[str, float]]) -> str:
    """Render a record's rows as the table of docs/onnxruntime_backend.md."""
    columns = result.values()
    return record.markdown(["", *result], ([n, *(c[n] for c in columns)] for n in next(iter(columns))))


def main() -> int:
    """Measure both batch sizes in turn, print and record the costs."""
    args = record.parsed(record.parser(__doc__, rounds=15, seconds=2.0))
    session = Session.from_config(ModelConfig.from_file(assets.REPOSITORY / MODEL, int(VERSION)))
    costs: dict[tuple[str, int], list[Cost]] = {column: [] for column in COLUMNS}
    with tempfile.TemporaryDirectory() as folder:
        repository = write_repository(Path(folder) / "models")
        with servers.served(Path(folder), os.environ, DEFAULT_PROFILE, repository) as server:
            client = Client(server.options.ports)
            for _ in range(args.rounds):
                for model, batch in COLUMNS:
                    costs[model, batch].append(measure(session, client, model, batch, args.seconds))
    result = {f"{model}, batch {batch}": summary(found) for (model, batch), found in costs.items()}
    print(markdown(result))
    return record.finish(args.record, {"rows": result})


if __name__ == "__main__":
    record.end(main)

"""What several instances of a large network cost in memory, with shared weights and without, and in speed.

python -m loadtest.memory [--rounds 3] [--record memory]
"""

import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import tritonclient.grpc
from onnx import helper, numpy_helper

from loadtest import processes, record, servers
from loadtest.backend import METRICS_LAG_S, run_counters
from nereid.server.command_line import PLAIN_PROFILE
from nereid.server.ports import Ports

MODEL, INSTANCES, WIDTH, HIDDEN, BLOCKS = "blocks", 8, 768, 3072, 12
REQUESTS = 200
CONFIG = f"""max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}
dynamic_batching {{ }}
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
"""
SHARED = 'parameters { key: "nereid.shared_weights" value { string_value: "true" } }\n'


def network() -> onnx.ModelProto:
    """Build the feed-forward blocks of a ViT-B: 226 MB of weights, drawn at random."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for block in range(BLOCKS):
        for part, shape in (("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
            name = f"{part}_{block}"
            array = rng.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[0]))
            weights.append(numpy_helper.from_array(array, name))
            nodes.append(helper.make_node("MatMul", [last, name], [f"{name}_product"]))
            nodes.append(helper.make_node("Relu", [f"{name}_product"], [f"{name}_out"]))
            last = f"{name}_out"
    nodes.append(helper.make_node("Identity", [last], ["y"]))
    tensors = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["batch", WIDTH]) for name in ("x", "y")
    ]
    graph = helper.make_graph(nodes, MODEL, tensors[:1], tensors[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def measure(repository: Path, instances: int, shared: bool) -> tuple[float, float]:
    """Serve the network; returns the instances' memory in MB (PSS) and the milliseconds of one run."""
    group = f"instance_group {{ kind: KIND_CPU count: {instances} }}\n"
    (repository / MODEL / "config.pbtxt").write_text(CONFIG + group + (SHARED if shared else ""))
    with (
        tempfile.TemporaryDirectory() as run_dir,
        servers.served(Path(run_dir), os.environ, PLAIN_PROFILE, repository) as server,
    ):
        ports = server.options.ports
        # Enough at once for every instance to have run, and to have touched its weights.
        with ThreadPoolExecutor(2 * instances) as pool:
            list(pool.map(lambda _: _infer(ports), range(REQUESTS)))
        time.sleep(METRICS_LAG_S)
        before = run_counters(ports, MODEL)
        for _ in range(REQUESTS):
            _infer(ports)
        time.sleep(METRICS_LAG_S)
        after = run_counters(ports, MODEL)
        run_ms = (after["sum"] - before["sum"]) / (after["count"] - before["count"]) * 1e3
        stubs = processes.tree(server.pid)[1:]
        return sum(processes.memory_bytes(stub.pid) for stub in stubs) / processes.MB, run_ms


def _infer(ports: Ports) -> None:
    tensor = tritonclient.grpc.InferInput("x", [1, WIDTH], "FP32")
    tensor.set_data_from_numpy(np.ones((1, WIDTH), np.float32))
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        client.infer(MODEL, [tensor])


def summary(samples: dict[tuple[int, bool], list[tuple[float, float]]]) -> list[dict[str, object]]:
    """Return a row for each number of instances, plain and shared, with medians over the rounds."""
    medians = {
        key: [statistics.median(column) for column in zip(*found, strict=True)]
        for key, found in samples.items()
    }
    return [
        {
            "instances": instances,
            "weights": "shared" if shared else "plain",
            "PSS, MB": round(pss_mb),
            "of one plain": round(pss_mb / medians[1, False][0], 2),
            "of one shared": round(pss_mb / medians[1, True][0], 2),
            "ms per run": round(run_ms, 2),
        }
        for (instances, shared), (pss_mb, run_ms) in medians.items()
    ]


def markdown(rows: list[dict[str, object]]) -> str:
    """Render a record's rows as the table of docs/onnxruntime_backend.md; a test compares the two."""
    return record.markdown([*rows[0]], ([*row.values()] for row in rows))


def main() -> None:
    """Measure one and eight instances in turn, plain and shared; print, record."""
    args = record.parsed(record.parser(__doc__, rounds=3))
    samples: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MODEL / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        onnx.save(network(), path)
        for _ in range(args.rounds):
            for instances in (1, INSTANCES):
                for shared in (False, True):
                    samples.setdefault((instances, shared), []).append(
                        measure(Path(folder), instances, shared)
                    )
        model_mb = path.stat().st_size / processes.MB
    rows = summary(samples)
    print(markdown(rows))
    args.record.write({"model_mb": round(model_mb), "rows": rows})


if __name__ == "__main__":
    record.end(main)

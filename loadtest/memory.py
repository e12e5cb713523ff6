"""Memory and speed of several instances of a large network, with shared and with private weights.

python -m loadtest.memory [--rounds 3] [--record memory]
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from loadtest import record, resource_usage, servers
from loadtest.backend import METRICS_DELAY_S, run_counters
from nereid.server.command_line import PLAIN_PROFILE
from nereid.server.control import Control
from nereid.server.embedded_server import EmbeddedServer, infer_path
from nereid.server.run_dir import ServerRecord
from nereid.tune import load_generator
from nereid.tune.load_generator import HOST
from nereid.tune.trial import request_bodies

MODEL, INSTANCES, WIDTH, HIDDEN, BLOCKS = "blocks", 8, 768, 3072, 12
LOAD_S = 4.0
CONFIG = f"""max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [ {WIDTH} ] }}
dynamic_batching {{ }}
parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }}
"""
SHARED = 'parameters { key: "nereid.shared_weights" value { string_value: "true" } }\n'

# PSS in MB and milliseconds of one run, by number of instances and sharing.
Samples = dict[tuple[int, bool], list[tuple[float, float]]]


def network() -> onnx.ModelProto:
    """Build the feed-forward blocks of a ViT-B: 226 MB of random weights."""
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
        # With this concurrency every instance runs, and touches its weights.
        _load(server, repository, 2 * instances)
        before_s, before = _run_counters_later(server)
        _load(server, repository, 1)
        after_s, after = _run_counters_later(server)
        run_ms = (after_s - before_s) / (after - before) * 1e3
        stubs = resource_usage.tree(server.pid)[1:]
        return sum(resource_usage.memory_bytes(stub.pid) for stub in stubs) / resource_usage.MB, run_ms


def _load(server: EmbeddedServer, repository: Path, concurrency: int) -> None:
    ports = server.options.ports
    about = ServerRecord(server.pid, HOST, ports, str(repository), PLAIN_PROFILE, "")
    ((body, headers),) = request_bodies(Control(about).config(MODEL), [])
    request = load_generator.post_request(HOST, ports.http, infer_path(MODEL), body, headers)
    load = load_generator.closed_loop(HOST, ports.http, [request], concurrency, LOAD_S)
    if load.failed or not load.answered:
        raise load_generator.LoadFailed(f"{load.answered} requests were answered, {load.failed} failed")


def _run_counters_later(server: EmbeddedServer) -> tuple[float, float]:
    time.sleep(METRICS_DELAY_S)
    return run_counters(server.options.ports, MODEL)


def summary(samples: Samples) -> list[record.Row]:
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


def markdown(rows: list[record.Row]) -> str:
    """Render a record's rows as the table of docs/onnxruntime_backend.md."""
    return record.markdown([*rows[0]], ([*row.values()] for row in rows))


def main() -> int:
    """Measure one and eight instances in turn, plain and shared; print and record the result."""
    args = record.parsed(record.parser(__doc__, rounds=3))
    samples: Samples = {(count, shared): [] for count in (1, INSTANCES) for shared in (False, True)}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MODEL / "1" / "model.onnx"
        path.parent.mkdir(parents=True)
        onnx.save(network(), path)
        for _ in range(args.rounds):
            for key, found in samples.items():
                found.append(measure(Path(folder), *key))
        model_mb = path.stat().st_size / resource_usage.MB
    rows = summary(samples)
    print(markdown(rows))
    return record.finish(args.record, {"model_mb": round(model_mb), "rows": rows})


if __name__ == "__main__":
    record.end(main)

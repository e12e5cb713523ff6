"""Extras of the onnxruntime backend: shared weights, metrics, and requests whose clients disconnected."""

import re
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import onnx
import pytest
import tritonclient.grpc
from onnx import helper

from nereid.inference import shared_weights
from tests.e2e.conftest import group_members
from tests.networks import (
    ONE_INSTANCE,
    assert_same,
    connect,
    constant,
    identity,
    infer,
    infer_together,
    network,
    run,
    serve,
    store,
    tensor,
    value,
)

INSTANCES = 4
SHARED = 'parameters { key: "nereid.shared_weights" value { string_value: "true" } }\n'
WARM = 'parameters { key: "nereid.warm_batch_sizes" value { string_value: "1,2,8" } }\n'
BATCHED = "max_batch_size: 8\n" + tensor("input", "x", "FP32", [64]) + tensor("output", "y", "FP32", [64])
# The backend hands its metrics on twice a second; a watchdog is ten times that and more.
LAG_S = 30


def mixing() -> onnx.ModelProto:
    """Build y = relu(x A) B, whose weights are worth a page."""
    rng = np.random.default_rng(0)
    weights = [constant(name, rng.standard_normal((64, 64)).astype(np.float32)) for name in "AB"]
    nodes = [
        helper.make_node("MatMul", ["x", "A"], ["hidden"]),
        helper.make_node("Relu", ["hidden"], ["positive"]),
        helper.make_node("MatMul", ["positive", "B"], ["y"]),
    ]
    return network(nodes, [value("x", "FP32", ["batch", 64])], [value("y", "FP32", ["batch", 64])], weights)


def slow() -> onnx.ModelProto:
    """Build y = x after `rounds` multiplications of a large matrix, to keep an instance busy."""
    node = helper.make_node
    body = helper.make_graph(
        [node("MatMul", ["state", "large"], ["next"]), node("Identity", ["go"], ["still"])],
        "body",
        [value("i", "INT64", []), value("go", "BOOL", []), value("state", "FP32", [512, 512])],
        [value("still", "BOOL", []), value("next", "FP32", [512, 512])],
    )
    return network(
        [
            node("Squeeze", ["rounds"], ["count"]),
            node("Loop", ["count", "true", "large"], ["end"], body=body),
            node("ReduceMax", ["end"], ["most"], keepdims=0),
            node("Mul", ["most", "zero"], ["nothing"]),
            node("Cast", ["nothing"], ["whole"], to=7),
            node("Add", ["rounds", "whole"], ["y"]),
        ],
        [value("rounds", "INT64", [1])],
        [value("y", "INT64", [1])],
        [
            constant("large", np.eye(512, dtype=np.float32)),
            constant("true", np.bool_(True)),
            constant("zero", np.float32(0)),
        ],
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A running server of a model with shared weights, a slow one, and one that rejects invalid UTF-8."""
    repository = tmp_path_factory.mktemp("models")
    group = f"instance_group {{ kind: KIND_CPU count: {INSTANCES} }}\n"
    store(repository, "shared", mixing(), BATCHED + SHARED + group)
    slow_io = tensor("input", "rounds", "INT64", [1]) + tensor("output", "y", "INT64", [1])
    store(repository, "warm", identity("FP32", ["N", 64]), BATCHED + ONE_INSTANCE + WARM)
    store(repository, "slow", slow(), ONE_INSTANCE + slow_io)
    text_io = tensor("input", "x", "STRING", [1]) + tensor("output", "y", "STRING", [1])
    store(repository, "text", identity("STRING", [1]), ONE_INSTANCE + text_io)
    with serve(repository, tmp_path_factory.mktemp("run")) as running:
        yield running


def metric(server, pattern: str) -> float:
    """Return the sum of the metrics page's lines that match, without their buckets."""
    options = server.options
    with urllib.request.urlopen(f"http://{options.host}:{options.ports.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(pattern, line))


def await_metric(server, pattern: str, expected: float) -> None:
    """Wait until a metric has the expected value, and fail with what it has if it never does."""
    pause = threading.Event()
    for _ in range(LAG_S * 10):
        if metric(server, pattern) == expected:
            return
        pause.wait(0.1)
    assert metric(server, pattern) == expected


def test_model_runs_each_batch_size_before_it_is_ready(server):
    """The runs at load count apart from those of requests."""
    labels = '{model="warm",version="1"}'
    await_metric(server, f"nereid_onnxruntime_warm_up_runs_total{labels}", 3)
    x = np.ones((2, 64), np.float32)

    assert_same(infer(server, "warm", {"x": x}), {"y": x})
    await_metric(server, f"nereid_onnxruntime_batch_size_count{labels}", 1)
    assert metric(server, f"nereid_onnxruntime_warm_up_runs_total{labels}") == 3


def mapped_weights(server) -> dict[int, set[str]]:
    """Return, by process of the server, the shared files that it maps."""
    place = shared_weights.folder_of(server.options.repository / "shared", 1)
    found = {}
    for pid in group_members(server.pid):
        maps = Path(f"/proc/{pid}/maps").read_text()
        if names := {line.split()[-1] for line in maps.splitlines() if str(place) in line}:
            found[pid] = names
    return found


def test_all_instances_map_the_same_file(server):
    """Instances that start together write one file, every one of them maps it, and answers stay the same."""
    rng = np.random.default_rng(1)
    folder = server.options.repository / "shared" / "1"
    requests = [{"x": rng.standard_normal((rows, 64)).astype(np.float32)} for rows in (1, 2, 8, 3) * 4]

    answers = infer_together(server, "shared", requests)

    for inputs, answer in zip(requests, answers, strict=True):
        assert_same(answer, run(folder / "model.onnx", inputs))
    maps = mapped_weights(server)
    assert len(maps) == INSTANCES
    assert len(set.union(*maps.values())) == 1


def test_file_is_written_once(server):
    """Each instance of a later load opens the file, and does not write it again."""
    (folder,) = shared_weights.folder_of(server.options.repository / "shared", 1).iterdir()
    (file,) = folder.glob("*.bin")
    written = file.stat().st_ctime_ns

    with connect(server) as client:
        client.unload_model("shared")
        client.load_model("shared")

    assert file.stat().st_ctime_ns == written


def test_runs_and_refusals_are_counted(server):
    """Runs, their rows, instances with their provider, and refusals by reason are on the metrics page."""
    labels = r'\{model="text",.*'
    inputs = {"x": np.array([b"\xff"], object)}
    infer(server, "text", {"x": np.array([b"text"], object)})

    with pytest.raises(tritonclient.grpc.InferenceServerException) as refusal:
        infer(server, "text", inputs)

    assert "input 'x': expected UTF-8" in refusal.value.message()
    assert refusal.value.status() == "StatusCode.INVALID_ARGUMENT"
    await_metric(server, f'nereid_onnxruntime_rejected_total{labels}reason="invalid_arg"', 1)
    await_metric(server, f"nereid_onnxruntime_run_seconds_count{labels}", 1)
    await_metric(server, f"nereid_onnxruntime_batch_size_sum{labels}", 1)
    await_metric(server, f"nereid_onnxruntime_sessions_total{labels}", 1)
    await_metric(server, f'nereid_onnxruntime_instances{labels}provider="CPUExecutionProvider"', 1)


@pytest.mark.slow
def test_unloaded_model_leaves_the_metrics_page(server):
    """The metrics of an unloaded model disappear from the page."""
    pattern = r'nereid_onnxruntime_instances\{model="brief"'
    store(server.options.repository, "brief", mixing(), BATCHED + ONE_INSTANCE)
    with connect(server) as client:
        client.load_model("brief")
        await_metric(server, pattern, 1)

        client.unload_model("brief")

    await_metric(server, pattern, 0)


@pytest.mark.slow
def test_cancelled_request_does_not_run(server):
    """A request whose client cancels it while it waits for a busy instance is not computed."""
    runs = r'nereid_onnxruntime_run_seconds_count\{model="slow"'
    rounds = tritonclient.grpc.InferInput("rounds", [1], "INT64")
    rounds.set_data_from_numpy(np.int64([600]))
    answers: SimpleQueue[Exception | tritonclient.grpc.InferResult] = SimpleQueue()

    def keep(result, error):
        answers.put(error or result)

    with connect(server) as client:
        for _ in range(2):  # after the first, the backend knows that runs of this model are long
            client.async_infer("slow", [rounds], keep)
        assert not isinstance(answers.get(timeout=LAG_S), Exception)
        await_metric(server, r'nv_inference_pending_request_count\{model="slow"', 0)
        leaving = client.async_infer("slow", [rounds], keep)
        await_metric(server, r'nv_inference_pending_request_count\{model="slow"', 1)
        leaving.cancel()
        outcomes = [answers.get(timeout=LAG_S) for _ in range(2)]

    assert [isinstance(outcome, Exception) for outcome in outcomes].count(True) == 1
    await_metric(server, runs, 2)
    await_metric(server, r'nereid_onnxruntime_rejected_total\{model="slow",reason="cancelled"', 1)
    assert metric(server, runs) == 2


@pytest.mark.slow
def test_server_without_metrics_answers(tmp_path):
    """A model serves requests if metrics are switched off."""
    path = store(tmp_path / "models", "quiet", mixing(), BATCHED + ONE_INSTANCE)
    inputs = {"x": np.ones((1, 64), np.float32)}
    (tmp_path / "run").mkdir()

    with serve(tmp_path / "models", tmp_path / "run", "--allow-metrics=false") as quiet:
        answers = infer_together(quiet, "quiet", [inputs] * 4)

    for answer in answers:
        assert_same(answer, run(path, inputs))


NAMED = ["zeta", "alpha", "mid", "beta"]
PROCESSES, ORDERED_REQUESTS = 20, 1000


@pytest.mark.slow
def test_outputs_come_in_the_order_of_their_names(tmp_path):
    """Clients may read outputs by their place; the order is the same in every process."""
    nodes = [helper.make_node("Identity", ["x"], [name]) for name in NAMED]
    model = network(nodes, [value("x", "FP32", [1])], [value(name, "FP32", [1]) for name in NAMED])
    many = f"instance_group {{ kind: KIND_CPU count: {PROCESSES} }}\n"
    store(tmp_path / "models", "named", model, 'backend: "onnxruntime"\nmax_batch_size: 0\n' + many)
    found = set()
    with serve(tmp_path / "models", tmp_path) as server, ThreadPoolExecutor(PROCESSES) as pool:
        url = f"{server.options.host}:{server.options.ports.grpc}"
        with tritonclient.grpc.InferenceServerClient(url) as client:
            given = tritonclient.grpc.InferInput("x", [1], "FP32")
            given.set_data_from_numpy(np.ones(1, np.float32))

            def order(number: int) -> tuple[str, ...]:
                wanted = NAMED[number % 4 :] + NAMED[: number % 4]
                outputs = [tritonclient.grpc.InferRequestedOutput(name) for name in wanted]
                response = client.infer("named", [given], outputs=outputs if number % 2 else None)
                return tuple(output.name for output in response.get_response().outputs)

            found = set(pool.map(order, range(ORDERED_REQUESTS)))

    assert found == {tuple(sorted(NAMED))}

"""Every kind of ONNX file through the real server: the answer is the one plain ONNX Runtime gives.

Also what the backend adds: shared weights, runs at load, metrics, and requests whose clients disconnect.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import onnx
import pytest
import tritonclient.grpc
from onnx import helper

from nereid.vision.inference import shared_weights, version_state
from tests.e2e.conftest import group_members, metric, url
from tests.networks import (
    DATATYPES,
    ONE_INSTANCE,
    Arrays,
    Dims,
    assert_same,
    connect,
    identity,
    infer,
    infer_together,
    network,
    parameter,
    run,
    sample,
    serve,
    store,
    tensor,
    value,
    written,
)
from tests.routes import wait_until
from tests.tables import cases

pytestmark = pytest.mark.nightly(minutes=2)

# A model that does not load fails its own tests only.
EACH_ALONE = ("--exit-on-error=false", "--strict-readiness=false")
# A watchdog: a batch of the preferred size runs immediately, a smaller one would wait this long.
TOGETHER = "dynamic_batching {{ preferred_batch_size: [ {0} ] max_queue_delay_microseconds: 20000000 }}\n"
INSTANCES, PROCESSES = 4, 6
# The backend hands its metrics on twice a second; a watchdog is ten times that and more.
LAG_S = 30
NAMED = ["zeta", "alpha", "mid", "beta"]


def made(kind: str, name: str, datatype: str) -> str:
    """Declare an input that the backend makes from the batch's ragged input `x`."""
    return (
        f'batch_input {{ kind: BATCH_{kind} target_name: "{name}" data_type: TYPE_{datatype} '
        'source_input: "x" }\n'
    )


@dataclass(frozen=True, slots=True)
class Case:
    """A model with an input of each datatype; it copies, doubles or transposes them, outputs in reverse.

    The four cases have every datatype in every combination of batched and dynamic, with three operators.
    """

    batched: bool
    dynamic: bool

    def __str__(self) -> str:
        return f"{'batched' if self.batched else 'whole'}_{'dynamic' if self.dynamic else 'static'}"

    def store(self, repository: Path) -> None:
        nodes, inputs, outputs, config = [], [], [], []
        shift = 2 * self.batched + self.dynamic
        for index, datatype in enumerate(DATATYPES):
            rows, columns = self.dims(index)
            operator, shape = [
                ({"op_type": "Identity"}, (rows, columns)),
                ({"op_type": "Concat", "axis": -1}, (rows, None if self.dynamic else 2 * columns)),
                ({"op_type": "Transpose", "perm": [0, 2, 1] if self.batched else [1, 0]}, (columns, rows)),
            ][(index + shift) % 3]
            x, y = datatype.lower(), f"of_{datatype.lower()}"
            sources = [x, x] if operator["op_type"] == "Concat" else [x]
            batch = ("batch",) if self.batched else ()
            nodes.append(helper.make_node(**operator, inputs=sources, outputs=[y]))
            inputs.append(value(x, datatype, (*batch, rows, columns)))
            outputs.append(value(y, datatype, (*batch, *shape)))
            config.append(tensor("input", x, datatype, (rows, columns)))
            config.append(tensor("output", y, datatype, shape))
        size = f"max_batch_size: {4 if self.batched else 0}\n"
        model = network(nodes, inputs, reversed(outputs))
        store(repository, str(self), model, "".join([size, ONE_INSTANCE, *config]))

    def dims(self, index: int) -> Dims:
        return (f"rows_{index}", f"columns_{index}") if self.dynamic else (2, 3 + index)

    def requests(self, rng: np.random.Generator) -> list[Arrays]:
        """Draw requests that differ in batch size and in those dims that may vary, also without elements.

        The batch dimension is never 0, which would crash this Triton.
        """
        batches = [(1,), (3,)] if self.batched else [()]
        shapes = [(1, 4), (3, 2), (3, 0)] if self.dynamic else [None]
        return [self.draw(batch, shape, rng) for batch in batches for shape in shapes]

    def draw(self, batch: Dims, shape: Dims | None, rng: np.random.Generator) -> Arrays:
        return {
            datatype.lower(): sample(datatype, (*batch, *(shape or self.dims(index))), rng)
            for index, datatype in enumerate(DATATYPES)
        }


CASES = [Case(*flags) for flags in itertools.product((False, True), (False, True))]


def mixing() -> onnx.ModelProto:
    """Build y = relu(x A) B, whose weights are worth a page."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((64, 64)).astype(np.float32) for name in "AB"}
    nodes = "hidden = MatMul(x, A) positive = Relu(hidden) y = MatMul(positive, B)"
    return written(f"(float[batch,64] x) => (float[batch,64] y) {{ {nodes} }}", **weights)


def ragged() -> onnx.ModelProto:
    """Build a network that negates its ragged input `x`, and returns the shapes of its items."""
    inputs = "float[?] x, int32[?,2] shape, float[?] flat"
    outputs = "float[?] negative, int32[?,2] its_shape, float[?,2] its_flat"
    nodes = "negative = Neg(x) its_shape = Identity(shape) its_flat = Reshape(flat, pairs)"
    return written(f"({inputs}) => ({outputs}) <int64[2] pairs = {{-1, 2}}> {{ {nodes} }}")


def slow() -> onnx.ModelProto:
    products = " ".join(f"m{n + 1} = MatMul(m{n}, eye)" for n in range(600))
    nodes = f"m0 = Mul(eye, x) {products} most = ReduceMax<keepdims = 0>(m600) y = Mul(most, x)"
    return written(f"(float[1] x) => (float[1] y) {{ {nodes} }}", eye=np.eye(512, dtype=np.float32))


def pair(datatype: str, dims: Dims, more: str = "") -> str:
    return tensor("input", "x", datatype, dims, more) + tensor("output", "y", datatype, dims, more)


def instances(count: int) -> str:
    return f"instance_group {{ kind: KIND_CPU count: {count} }}\n"


ROWS = "max_batch_size: 8\n" + pair("FP32", [64])
RAGGED = [
    "max_batch_size: 3\n",
    TOGETHER.format(3),
    tensor("input", "x", "FP32", [-1, -1], "allow_ragged_batch: true"),
    made("ITEM_SHAPE", "shape", "INT32"),
    made("ITEM_SHAPE_FLATTEN", "flat", "FP32"),
    tensor("output", "negative", "FP32", [-1, -1]),
    tensor("output", "its_shape", "INT32", [2]),
    tensor("output", "its_flat", "FP32", [2]),
    'batch_output { target_name: "negative" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }\n',
]


def store_special(repository: Path) -> None:
    outputs = ", ".join(f"float[1] {name}" for name in NAMED)
    nodes = " ".join(f"{name} = Identity(x)" for name in NAMED)
    copies = written(f"(float[1] x) => ({outputs}) {{ {nodes} }}")
    for name, model, config in (
        ("scalar", identity("FP64", []), pair("FP64", [1])),
        ("column", identity("INT32", ["batch"]), "max_batch_size: 4\n" + pair("INT32", [1], "reshape { }")),
        ("ragged", ragged(), "".join(RAGGED)),
        ("text", identity("STRING", [2]), pair("STRING", [2])),
        ("slow", slow(), pair("FP32", [1])),
        ("warm", identity("FP32", ["N", 64]), ROWS + parameter("nereid.warm_batch_sizes", "1,2,8")),
    ):
        store(repository, name, model, ONE_INSTANCE + config)
    shares = parameter("nereid.shared_weights", "true")
    store(repository, "shared", mixing(), ROWS + shares + instances(INSTANCES))
    store(repository, "ordered", copies, 'backend: "onnxruntime"\n' + instances(PROCESSES))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    repository = tmp_path_factory.mktemp("models")
    for case in CASES:
        case.store(repository)
    store_special(repository)
    with serve(repository, tmp_path_factory.mktemp("run"), *EACH_ALONE) as running:
        yield running


@pytest.fixture
def rng():
    return np.random.default_rng(24)


def plain_run(server, model: str, inputs: Arrays) -> Arrays:
    return run(server.options.repository / model / "1" / "model.onnx", inputs)


def executions(server, model: str) -> int:
    with connect(server) as client:
        return client.get_inference_statistics(model).model_stats[0].execution_count


def await_metric(server, name: str, expected: float, **labels: str) -> None:
    address = url(server, "metrics")
    wait_until(lambda: metric(address, name, **labels) == expected, f"{name} {expected}", LAG_S)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_are_those_of_onnx_runtime(server, case, protocol, rng):
    for inputs in case.requests(rng):
        assert_same(infer(server, str(case), inputs, protocol), plain_run(server, str(case), inputs))


@cases(
    # The dims of the config, [1], are those of the answer.
    scalar=("scalar", {"x": np.float64([2.5])}),
    reshaped_to_a_vector=("column", {"x": np.int32([[1], [2], [3]])}),
)
def test_config_dims_are_those_of_the_answer(model, inputs, server):
    """An ONNX scalar takes one number; with dims [1] and an empty reshape, [N, 1] goes in and out."""
    assert_same(infer(server, model, inputs), {"y": inputs["x"]})


def test_outputs_come_in_the_order_of_their_names(server):
    """Clients may read outputs by their place; the order is the same in every process."""
    inputs = {"x": np.ones(1, np.float32)}

    answers = infer_together(server, "ordered", [inputs] * 8 * PROCESSES)

    assert {tuple(answer) for answer in answers} == {tuple(sorted(NAMED))}
    assert list(infer(server, "ordered", inputs, outputs=NAMED[:2])) == sorted(NAMED[:2])


def test_ragged_requests_share_a_batch(server):
    requests = [
        {"x": np.arange(6, dtype=np.float32).reshape(2, 3, 1)},
        {"x": np.arange(4, dtype=np.float32).reshape(1, 2, 2)},
    ]
    before = executions(server, "ragged")

    outcomes = infer_together(server, "ragged", requests)

    for outcome, inputs, shapes in zip(outcomes, requests, [[[3, 1], [3, 1]], [[2, 2]]], strict=True):
        expected = {"negative": -inputs["x"], "its_shape": np.int32(shapes), "its_flat": np.float32(shapes)}
        assert_same(outcome, expected)
    assert executions(server, "ragged") - before == 1


def test_model_runs_each_batch_size_before_it_is_ready(server):
    await_metric(server, "nereid_onnxruntime_warm_up_runs_total", 3, model="warm")
    x = np.ones((2, 64), np.float32)

    assert_same(infer(server, "warm", {"x": x}), {"y": x})
    await_metric(server, "nereid_onnxruntime_batch_size_count", 1, model="warm")
    assert metric(url(server, "metrics"), "nereid_onnxruntime_warm_up_runs_total", model="warm") == 3


def test_all_instances_map_the_same_file(server):
    """Instances that start together write one file and map it; a later load does not write it again."""
    rng = np.random.default_rng(1)
    requests = [{"x": rng.standard_normal((rows, 64)).astype(np.float32)} for rows in (1, 2, 8, 3) * 4]
    weights_folder = version_state.folder_of(server.options.repository / "shared", 1, shared_weights.FOLDER)

    answers = infer_together(server, "shared", requests)

    for inputs, answer in zip(requests, answers, strict=True):
        assert_same(answer, plain_run(server, "shared", inputs))
    maps = [Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in group_members(server.pid)]
    names = [{line.split()[-1] for line in lines if str(weights_folder) in line} for lines in maps]
    mapped = [files for files in names if files]
    assert len(mapped) == INSTANCES
    assert len(set.union(*mapped)) == 1
    (file,) = weights_folder.glob("*/*.bin")
    written = file.stat().st_ctime_ns
    with connect(server) as client:
        client.unload_model("shared")
        client.load_model("shared")
    assert file.stat().st_ctime_ns == written


def test_runs_and_refusals_are_counted_until_the_model_is_unloaded(server):
    infer(server, "text", {"x": np.array([b"some", b"text"], object)})

    with pytest.raises(tritonclient.grpc.InferenceServerException) as refusal:
        infer(server, "text", {"x": np.array([b"text", b"\xff"], object)})

    assert "input 'x': expected UTF-8" in refusal.value.message()
    assert refusal.value.status() == "StatusCode.INVALID_ARGUMENT"
    for name, labels in (
        ("rejected_total", {"reason": "invalid_arg"}),
        ("run_seconds_count", {}),
        ("batch_size_sum", {}),
        ("sessions_total", {}),
        ("instances", {"provider": "CPUExecutionProvider"}),
    ):
        await_metric(server, f"nereid_onnxruntime_{name}", 1, model="text", **labels)

    with connect(server) as client:
        client.unload_model("text")
    await_metric(server, "nereid_onnxruntime_instances", 0, model="text")


def test_cancelled_request_does_not_run(server):
    runs, waiting = "nereid_onnxruntime_run_seconds_count", "nv_inference_pending_request_count"
    x = tritonclient.grpc.InferInput("x", [1], "FP32")
    x.set_data_from_numpy(np.float32([1]))
    answers: SimpleQueue[Exception | tritonclient.grpc.InferResult] = SimpleQueue()

    def keep(result, error):
        answers.put(error or result)

    with connect(server) as client:
        for _ in range(2):  # after the first, the backend knows that runs of this model are long
            client.async_infer("slow", [x], keep)
        assert not isinstance(answers.get(timeout=LAG_S), Exception)
        await_metric(server, waiting, 0, model="slow")
        leaving = client.async_infer("slow", [x], keep)
        await_metric(server, waiting, 1, model="slow")
        leaving.cancel()
        outcomes = [answers.get(timeout=LAG_S) for _ in range(2)]

    assert [isinstance(outcome, Exception) for outcome in outcomes].count(True) == 1
    await_metric(server, runs, 2, model="slow")
    await_metric(server, "nereid_onnxruntime_rejected_total", 1, model="slow", reason="cancelled")
    assert metric(url(server, "metrics"), runs, model="slow") == 2

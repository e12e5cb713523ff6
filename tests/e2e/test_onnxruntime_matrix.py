"""Every kind of ONNX file through the real server: the answer is the one plain ONNX Runtime gives."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import onnx
import pytest
from onnx import helper
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.networks import (
    DATATYPES,
    ONE_INSTANCE,
    Arrays,
    Dims,
    assert_same,
    connect,
    constant,
    identity,
    infer,
    infer_together,
    network,
    run,
    sample,
    serve,
    store,
    tensor,
    value,
)
from tests.tables import cases

pytestmark = pytest.mark.slow

PROTOCOLS = ["http", "grpc"]
# A model that does not load fails its own tests only.
EACH_ALONE = ("--exit-on-error=false", "--strict-readiness=false")
# A watchdog: a batch of the preferred size runs immediately, a smaller one would wait this long.
TOGETHER = "dynamic_batching {{ preferred_batch_size: [ {0} ] max_queue_delay_microseconds: 20000000 }}\n"


@dataclass(frozen=True, slots=True)
class Case:
    """A model that copies, doubles and transposes its inputs; its outputs are in the opposite order."""

    batched: bool
    dynamic: bool
    datatypes: tuple[str, ...]

    def __str__(self) -> str:
        words = ["batched" if self.batched else "whole", "dynamic" if self.dynamic else "static"]
        return "_".join([*words, *self.datatypes]).lower()

    def store(self, repository: Path) -> None:
        """Write the model's folder."""
        nodes, inputs, outputs, config = [], [], [], []
        for index, datatype in enumerate(self.datatypes):
            rows, columns = self.dims(index)
            operator, shape = [
                ({"op_type": "Identity"}, (rows, columns)),
                ({"op_type": "Concat", "axis": -1}, (rows, None if self.dynamic else 2 * columns)),
                ({"op_type": "Transpose", "perm": [0, 2, 1] if self.batched else [1, 0]}, (columns, rows)),
            ][index % 3]
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
        """Return the dims of an input, without the batch dimension."""
        return (f"rows_{index}", f"columns_{index}") if self.dynamic else (2, 3 + index)

    def requests(self, rng: np.random.Generator) -> list[Arrays]:
        """Draw requests that differ in batch size and in those dims that may vary."""
        batches = [(1,), (3,)] if self.batched else [()]
        shapes = [(1, 4), (3, 2)] if self.dynamic else [None]
        return [self.draw(batch, shape, rng) for batch in batches for shape in shapes]

    def empty(self, rng: np.random.Generator) -> Arrays:
        """Draw a request without any element; not the batch dimension, which would crash this Triton."""
        return self.draw((2,) if self.batched else (), (3, 0), rng)

    def draw(self, batch: Dims, shape: Dims | None, rng: np.random.Generator) -> Arrays:
        """Draw a request of one shape, or of the inputs' own."""
        return {
            datatype.lower(): sample(datatype, (*batch, *(shape or self.dims(index))), rng)
            for index, datatype in enumerate(self.datatypes)
        }


def covering() -> list[Case]:
    """List cases that have every datatype once batched and once not, and one to four tensors."""
    cases = []
    for batched, order in ((False, DATATYPES), (True, reversed(DATATYPES))):
        words = iter(order)
        for dynamic, counts in ((False, (1, 2, 3)), (True, (1, 2, 4))):
            cases += [Case(batched, dynamic, tuple(itertools.islice(words, count))) for count in counts]
    return cases


def every() -> list[Case]:
    """List the whole product: batched or not × static or dynamic × one to three tensors × datatypes."""
    words = (*DATATYPES, *DATATYPES)
    return [
        Case(batched, dynamic, words[start : start + count])
        for batched, dynamic, count in itertools.product((False, True), (False, True), (1, 2, 3))
        for start in range(0, len(DATATYPES), count)
    ]


COVERING = covering()


def optional() -> onnx.ModelProto:
    """Build y = x * scale + shift: `scale` may be overridden; `shift` is an initializer and no input."""
    return network(
        [
            helper.make_node("Mul", ["x", "scale"], ["product"]),
            helper.make_node("Add", ["product", "shift"], ["y"]),
        ],
        [value("x", "FP32", ["n"]), value("scale", "FP32", [1])],
        [value("y", "FP32", ["n"])],
        [constant("scale", np.float32([2])), constant("shift", np.float32([0.5]))],
    )


def weighted() -> onnx.ModelProto:
    """Build y = x * weights, batched."""
    return network(
        [helper.make_node("Mul", ["x", "weights"], ["y"])],
        [value("x", "FP32", ["batch", 4])],
        [value("y", "FP32", ["batch", 4])],
        [constant("weights", np.float32([0.1, 0.2, 0.3, 0.4]))],
    )


def lookup() -> onnx.ModelProto:
    """Build y = table[row], which fails for a row that is not there."""
    return network(
        [helper.make_node("Gather", ["table", "row"], ["y"])],
        [value("row", "INT64", ["batch", 1])],
        [value("y", "FP32", ["batch", 1])],
        [constant("table", np.float32([10, 11, 12, 13]))],
    )


def counted() -> onnx.ModelProto:
    """Build a network that takes every kind of count of its ragged input `x`, and uses them to sum its parts.

    `widest` is the only one whose shape, not its value, is the information.
    """
    node = helper.make_node
    return network(
        [
            node("CumSum", ["x", "zero"], ["sums"]),
            node("Concat", ["nothing", "sums"], ["prefixes"], axis=0),
            node("Slice", ["bounds", "zero_1", "minus_1", "zero_1"], ["start"]),
            node("Gather", ["prefixes", "start"], ["before"]),
            node("Gather", ["prefixes", "end"], ["until"]),
            node("Sub", ["until", "before"], ["sum"]),
            node("Identity", ["count"], ["its_count"]),
            node("Identity", ["end"], ["its_end"]),
            node("Shape", ["widest"], ["width"]),
            node("Shape", ["count"], ["requests"]),
            node("Expand", ["width", "requests"], ["its_width"]),
        ],
        [
            value("x", "FP32", [None]),
            value("count", "FP32", [None]),
            value("end", "INT32", [None]),
            value("bounds", "INT32", [None]),
            value("widest", "FP32", [None]),
        ],
        [
            value("sum", "FP32", [None]),
            value("its_count", "FP32", [None]),
            value("start", "INT32", [None]),
            value("its_end", "INT32", [None]),
            value("its_width", "INT64", [None]),
        ],
        [
            constant("zero", np.int64(0)),
            constant("zero_1", np.int64([0])),
            constant("minus_1", np.int64([-1])),
            constant("nothing", np.float32([0])),
        ],
    )


def shaped() -> onnx.ModelProto:
    """Build a network that takes the shape of each item of its ragged input `x`, and negates `x`."""
    return network(
        [
            helper.make_node("Neg", ["x"], ["negative"]),
            helper.make_node("Identity", ["shape"], ["its_shape"]),
            helper.make_node("Reshape", ["flat", "pairs"], ["its_flat"]),
        ],
        [value("x", "FP32", [None]), value("shape", "INT32", [None, 2]), value("flat", "FP32", [None])],
        [
            value("negative", "FP32", [None]),
            value("its_shape", "INT32", [None, 2]),
            value("its_flat", "FP32", [None, 2]),
        ],
        [constant("pairs", np.int64([-1, 2]))],
    )


def started() -> onnx.ModelProto:
    """Build y = x - start, where `start` is the control of a sequence."""
    return network(
        [helper.make_node("Sub", ["x", "start"], ["y"])],
        [value("x", "FP32", ["batch", 1]), value("start", "FP32", ["batch", 1])],
        [value("y", "FP32", ["batch", 1])],
    )


def batch_input(kind: str, name: str, datatype: str) -> str:
    """Declare an input that the backend makes from the batch's ragged input `x`."""
    return (
        f'batch_input {{ kind: BATCH_{kind} target_name: "{name}" data_type: TYPE_{datatype} '
        'source_input: "x" }\n'
    )


def pair(datatype: str, dims: Dims, more: str = "") -> str:
    """Declare an input `x` and an output `y` alike."""
    return tensor("input", "x", datatype, dims, more) + tensor("output", "y", datatype, dims, more)


SCALAR = "reshape { shape: [ ] }"
RAGGED = "allow_ragged_batch: true"
WEIGHTED = ONE_INSTANCE + "max_batch_size: 8\n" + pair("FP32", [4])
OPTIONAL = [
    ONE_INSTANCE,
    tensor("input", "x", "FP32", [-1]),
    tensor("input", "scale", "FP32", [1], "optional: true"),
    tensor("output", "y", "FP32", [-1]),
]
LOOKUP = [
    ONE_INSTANCE,
    "max_batch_size: 4\n",
    TOGETHER.format(4),
    tensor("input", "row", "INT64", [1]),
    tensor("output", "y", "FP32", [1]),
]
COUNTED = [
    ONE_INSTANCE,
    "max_batch_size: 3\n",
    TOGETHER.format(3),
    tensor("input", "x", "FP32", [-1], RAGGED),
    batch_input("ELEMENT_COUNT", "count", "FP32"),
    batch_input("ACCUMULATED_ELEMENT_COUNT", "end", "INT32"),
    batch_input("ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", "bounds", "INT32"),
    batch_input("MAX_ELEMENT_COUNT_AS_SHAPE", "widest", "FP32"),
    tensor("output", "sum", "FP32", [1], SCALAR),
    tensor("output", "its_count", "FP32", [1], SCALAR),
    tensor("output", "start", "INT32", [1], SCALAR),
    tensor("output", "its_end", "INT32", [1], SCALAR),
    tensor("output", "its_width", "INT64", [1], SCALAR),
]
SHAPED = [
    ONE_INSTANCE,
    "max_batch_size: 3\n",
    TOGETHER.format(3),
    tensor("input", "x", "FP32", [-1, -1], RAGGED),
    batch_input("ITEM_SHAPE", "shape", "INT32"),
    batch_input("ITEM_SHAPE_FLATTEN", "flat", "FP32"),
    tensor("output", "negative", "FP32", [-1, -1]),
    tensor("output", "its_shape", "INT32", [2]),
    tensor("output", "its_flat", "FP32", [2]),
    'batch_output { target_name: "negative" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }\n',
]
STARTED = [
    ONE_INSTANCE,
    "max_batch_size: 2\n",
    "sequence_batching { control_input {\n",
    '  name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }\n',
    "} }\n",
    pair("FP32", [1]),
]


def store_special(repository: Path) -> None:
    """Write the models that are one of a kind."""
    column = ONE_INSTANCE + "max_batch_size: 4\n" + pair("INT32", [1], SCALAR)
    named = WEIGHTED + 'backend: "onnxruntime" default_model_filename: "net.onnx"\n'
    bin_file = "weights.bin"
    store(repository, "scalar", identity("FP64", []), ONE_INSTANCE + pair("FP64", [1]))
    store(repository, "column", identity("INT32", ["batch"]), column)
    store(repository, "optional", optional(), "".join(OPTIONAL))
    store(repository, "external", weighted(), WEIGHTED, weights=bin_file)
    store(repository, "folder", weighted(), WEIGHTED, filename="model.onnx/model.onnx", weights=bin_file)
    store(repository, "named", weighted(), named, filename="net.onnx")
    store(repository, "plain", weighted(), config=None)
    store(repository, "sizes", weighted(), WEIGHTED + TOGETHER.format(8))
    store(repository, "lookup", lookup(), "".join(LOOKUP))
    store(repository, "counted", counted(), "".join(COUNTED))
    store(repository, "shaped", shaped(), "".join(SHAPED))
    store(repository, "started", started(), "".join(STARTED))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A running server of the covering cases and of the models that are one of a kind."""
    repository = tmp_path_factory.mktemp("models")
    for case in COVERING:
        case.store(repository)
    store_special(repository)
    with serve(repository, tmp_path_factory.mktemp("run"), *EACH_ALONE) as running:
        yield running


@pytest.fixture(scope="module")
def full_server(tmp_path_factory):
    """A running server of the whole product."""
    repository = tmp_path_factory.mktemp("all_models")
    for case in every():
        case.store(repository)
    with serve(repository, tmp_path_factory.mktemp("run"), *EACH_ALONE) as running:
        yield running


@pytest.fixture
def rng():
    """A source of the same numbers in each run."""
    return np.random.default_rng(24)


def onnx_file(server, model: str) -> Path:
    """Return the path of a model's network."""
    return server.options.repository / model / "1" / "model.onnx"


def executions(server, model: str) -> int:
    """Return how many batches a model has run."""
    with connect(server) as client:
        return client.get_inference_statistics(model).model_stats[0].execution_count


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_answers_are_those_of_onnx_runtime(server, case, protocol, rng):
    """Every datatype, batched or not, with static and dynamic dims, comes back bit for bit."""
    for inputs in case.requests(rng):
        assert_same(infer(server, str(case), inputs, protocol), run(onnx_file(server, str(case)), inputs))


@pytest.mark.slow
@pytest.mark.parametrize("case", every(), ids=str)
def test_every_combination_is_answered_as_by_onnx_runtime(full_server, case, rng):
    """The same for the whole product, not only for a covering part of it."""
    for inputs, protocol in zip(case.requests(rng), itertools.cycle(PROTOCOLS), strict=False):
        expected = run(onnx_file(full_server, str(case)), inputs)
        assert_same(infer(full_server, str(case), inputs, protocol), expected)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("case", [case for case in COVERING if case.dynamic], ids=str)
def test_empty_tensors_stay_empty(server, case, protocol, rng):
    """Without an element in any tensor, the answer still has the right shapes."""
    inputs = case.empty(rng)

    assert_same(infer(server, str(case), inputs, protocol), run(onnx_file(server, str(case)), inputs))


def test_scalar_is_answered_in_the_config_dims(server):
    """An ONNX scalar takes one number, and its answer has the shape [1] that the config gives."""
    inputs = {"x": np.float64([2.5])}

    assert_same(infer(server, "scalar", inputs), {"y": inputs["x"]})


def test_column_is_reshaped_to_a_vector(server):
    """With dims [1] and an empty reshape, [N, 1] goes in and out of a network that takes [N]."""
    inputs = {"x": np.int32([[1], [2], [3]])}

    assert_same(infer(server, "column", inputs), {"y": inputs["x"]})


@pytest.mark.parametrize("scale", [None, 3], ids=["left out", "given"])
def test_optional_input_overrides_the_initializer(server, scale):
    """An input that the network has a value for may be left out."""
    inputs = {"x": np.float32([1, 2])} | ({"scale": np.float32([scale])} if scale else {})

    assert_same(infer(server, "optional", inputs), run(onnx_file(server, "optional"), inputs))


@cases(
    ("model", "filename"),
    {
        "weights in a file of their own": ("external", "model.onnx"),
        "model.onnx is a folder": ("folder", "model.onnx/model.onnx"),
        "default_model_filename": ("named", "net.onnx"),
        "no config": ("plain", "model.onnx"),
    },
)
def test_network_is_found_however_it_is_stored(server, model, filename, rng):
    """The file may have another name, lie in a folder, keep its weights outside, or have no config."""
    inputs = {"x": sample("FP32", (2, 4), rng)}

    assert_same(infer(server, model, inputs), run(onnx_file(server, model).parent / filename, inputs))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_only_requested_outputs_are_returned(server, protocol, rng):
    """A client that names outputs gets those and no others."""
    case = next(case for case in COVERING if len(case.datatypes) == 3)
    wanted = [f"of_{datatype.lower()}" for datatype in case.datatypes[:2]]
    inputs = case.requests(rng)[0]
    expected = run(onnx_file(server, str(case)), inputs)

    answer = infer(server, str(case), inputs, protocol, outputs=wanted)

    assert_same(answer, {name: expected[name] for name in wanted})


def test_one_bad_request_in_a_batch_fails_alone(server):
    """The others are answered; the bad one gets ONNX Runtime's own words as INTERNAL."""
    before = executions(server, "lookup")

    outcomes = infer_together(server, "lookup", [{"row": np.int64([[row]])} for row in (1, 9, 3, 0)])

    bad = outcomes.pop(1)
    for outcome, expected in zip(outcomes, [11, 13, 10], strict=True):
        assert_same(outcome, {"y": np.float32([[expected]])})
    assert bad.status() == "StatusCode.INTERNAL"
    assert "onnx runtime error 2: " in bad.message()
    assert "idx=9 must be within the inclusive range [-4,3]" in bad.message()
    assert executions(server, "lookup") - before == 1


def test_requests_of_different_sizes_share_a_batch(server, rng):
    """Requests of 1, 2, 3 and 2 rows run once, together, and each gets its own rows."""
    requests = [{"x": sample("FP32", (size, 4), rng)} for size in (1, 2, 3, 2)]
    before = executions(server, "sizes")

    outcomes = infer_together(server, "sizes", requests)

    for outcome, inputs in zip(outcomes, requests, strict=True):
        assert_same(outcome, run(onnx_file(server, "sizes"), inputs))
    assert executions(server, "sizes") - before == 1


def test_batch_inputs_count_the_elements_of_each_request(server):
    """Ragged requests are joined end to end; each sees its count, its bounds, the widest, and its sum."""
    requests = [{"x": np.float32([row])} for row in ([1, 2, 4], [8], [16, 32])]
    before = executions(server, "counted")

    outcomes = infer_together(server, "counted", requests)

    for outcome, inputs in zip(outcomes, requests, strict=True):
        start, size = outcome["start"], inputs["x"].size
        expected = {
            "sum": np.float32([[inputs["x"].sum()]]),
            "its_count": np.float32([[size]]),
            "start": start,
            "its_end": start + np.int32(size),
            "its_width": np.int64([[3]]),
        }
        assert_same(outcome, expected)
    bounds = sorted((outcome["start"].item(), outcome["its_end"].item()) for outcome in outcomes)
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert executions(server, "counted") - before == 1


def test_batch_inputs_give_the_shape_of_each_item(server):
    """A request of two items has two rows of shapes, and its part of a joined output in its own shape."""
    requests = [
        {"x": np.arange(6, dtype=np.float32).reshape(2, 3, 1)},
        {"x": np.arange(4, dtype=np.float32).reshape(1, 2, 2)},
    ]
    before = executions(server, "shaped")

    outcomes = infer_together(server, "shaped", requests)

    for outcome, inputs, shapes in zip(outcomes, requests, [[[3, 1], [3, 1]], [[2, 2]]], strict=True):
        expected = {"negative": -inputs["x"], "its_shape": np.int32(shapes), "its_flat": np.float32(shapes)}
        assert_same(outcome, expected)
    assert executions(server, "shaped") - before == 1


def test_sequence_control_is_an_input(server):
    """The first request of a sequence has the control set, the next one has not."""
    inputs = {"x": np.float32([[5]])}

    first = infer(server, "started", inputs, sequence_id=7, sequence_start=True)
    second = infer(server, "started", inputs, sequence_id=7, sequence_end=True)

    assert_same(first, {"y": np.float32([[4]])})
    assert_same(second, {"y": np.float32([[5]])})


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        (b"\1\0\0\0a", ["expected 2 string elements for inference input 'string'", "got 1"]),
        (
            b"\0\0\0\0" * 3,
            ["unexpected number of string elements 3 for inference input 'string'", "expecting 2"],
        ),
        (
            b"\0\0\0\0\5\0\0\0ab",
            [
                "incomplete string data for inference input 'string'",
                "expecting string of length 5 but only 2 bytes available",
            ],
        ),
    ],
    ids=["too few", "too many", "cut off"],
)
def test_malformed_strings_are_refused(server, wire, words):
    """BYTES that do not hold as many strings as the shape says are the caller's fault."""
    case = next(case for case in COVERING if case.datatypes[-1] == "STRING" and case.dynamic)
    shapes = [(0, 0)] * (len(case.datatypes) - 1) + [(1, 2)]
    request = service_pb2.ModelInferRequest(model_name=str(case))
    for datatype, shape in zip(case.datatypes, shapes, strict=True):
        name, word = datatype.lower(), "BYTES" if datatype == "STRING" else datatype
        request.inputs.add(name=name, datatype=word, shape=shape)
        request.raw_input_contents.append(wire if datatype == "STRING" else b"")
    options = server.options

    with (
        grpc.insecure_channel(f"{options.host}:{options.ports.grpc}") as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)

    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert [word for word in words if word not in refused.value.details()] == []

"""Joining requests and cutting answers, against values worked out by hand from model_config.proto."""

from pathlib import Path

import numpy as np
import pytest

from nereid.config.model_config import ModelConfig
from nereid.inference.batching import Batching, BatchInput, concatenate
from nereid.serving_errors import InferenceFailed, InvalidConfig
from tests.tables import cases

PLAIN = Batching(8, frozenset(), (), {})
NO_BATCHES = Batching(0, frozenset(), (), {})
# Three requests of x: one row of two, two rows of three, one row of one; 2, 6 and 1 elements.
UNLIKE = [
    {"x": np.array([[1, 2]], np.float32)},
    {"x": np.array([[3, 4, 5], [6, 7, 8]], np.float32)},
    {"x": np.array([[9]], np.float32)},
]


def config(max_batch_size: int = 8, **document) -> ModelConfig:
    """Build the config of a model `m` that takes `x`."""
    tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": ["-1"], "allow_ragged_batch": True}
    return ModelConfig.from_document(
        {"name": "m", "max_batch_size": max_batch_size, "input": [tensor], **document}, Path("/r/m"), 1
    )


def made(kind: str, datatype: str = "TYPE_FP32", names=("made",)) -> dict:
    """Write a `batch_input` as a config has it."""
    return {"kind": kind, "target_name": [*names], "data_type": datatype, "source_input": ["x"]}


def assert_equal(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Assert that names, datatypes, shapes and values are the same."""
    assert {name: (array.dtype, array.shape) for name, array in actual.items()} == {
        name: (array.dtype, array.shape) for name, array in expected.items()
    }
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array, name)


def test_config_becomes_a_batching():
    """Every field of the config that says how requests are joined is read."""
    document = {
        "batch_input": [
            made("BATCH_ELEMENT_COUNT", "TYPE_INT32", ("a", "b")),
            made("BATCH_ITEM_SHAPE", "TYPE_FP32", ("c",)),
        ],
        "batch_output": [
            {"kind": "BATCH_SCATTER_WITH_INPUT_SHAPE", "target_name": ["y", "z"], "source_input": ["x"]}
        ],
    }

    assert Batching.from_config(config(4, **document)) == Batching(
        max_batch_size=4,
        ragged=frozenset({"x"}),
        batch_inputs=(
            BatchInput("a", "ELEMENT_COUNT", "x", np.int32),
            BatchInput("b", "ELEMENT_COUNT", "x", np.int32),
            BatchInput("c", "ITEM_SHAPE", "x", np.float32),
        ),
        scattered={"y": "x", "z": "x"},
    )


def test_plain_config_is_joined_by_rows():
    """A config without any of these fields joins and cuts by rows."""
    plain = {"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["2"]}]}

    assert Batching.from_config(config(**plain)) == PLAIN


def test_first_kind_may_be_left_out():
    """A sibling's config is read from its file, where protobuf's JSON leaves out what is the default."""
    first = made("BATCH_ELEMENT_COUNT")
    del first["kind"]

    (read,) = Batching.from_config(config(batch_input=[first])).batch_inputs

    assert read == BatchInput("made", "ELEMENT_COUNT", "x", np.float32)


@pytest.mark.parametrize(
    ("kind", "datatype"),
    [("BATCH_OF_COOKIES", "TYPE_FP32"), ("BATCH_ELEMENT_COUNT", "TYPE_INT64")],
    ids=["kind", "datatype"],
)
def test_unknown_batch_input_is_refused(kind, datatype):
    """A kind or datatype this backend does not know fails the load with those it does."""
    with pytest.raises(InvalidConfig) as raised:
        Batching.from_config(config(batch_input=[made(kind, datatype)]))

    assert str(raised.value) == (
        "model 'm', batch input 'made': expected a kind of BATCH_ELEMENT_COUNT, "
        "BATCH_ACCUMULATED_ELEMENT_COUNT, BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO, "
        "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE, BATCH_ITEM_SHAPE, BATCH_ITEM_SHAPE_FLATTEN and a datatype of "
        f"TYPE_INT32, TYPE_FP32, got {kind} and {datatype}"
    )


@cases(
    ("batching", "expected"),
    {
        "plain": (PLAIN, True),
        "ragged": (Batching(8, frozenset({"x"}), (), {}), False),
        "made from the batch": (
            Batching(8, frozenset(), (BatchInput("n", "ELEMENT_COUNT", "x", np.int32),), {}),
            False,
        ),
        "scattered": (Batching(8, frozenset(), (), {"y": "x"}), False),
    },
)
def test_only_a_plain_batch_is_cut_between_rows(batching, expected):
    """If an input or output belongs to the batch as a whole, rows are not independent."""
    assert batching.is_by_rows is expected


@cases(
    ("batching", "shape", "rows"),
    {
        "no rows": (PLAIN, (0, 3), 0),
        "one row": (PLAIN, (1, 3), 1),
        "five rows": (PLAIN, (5, 3), 5),
        "without batches": (NO_BATCHES, (5, 3), 1),
        "scalar without batches": (NO_BATCHES, (), 1),
    },
)
def test_rows_are_the_first_dimension(batching, shape, rows):
    """With batches the first dimension counts; without them every request is one."""
    assert batching.rows({"x": np.zeros(shape)}) == rows


def test_request_without_inputs_is_one_where_there_are_no_batches():
    """A network whose inputs are all optional may get none of them."""
    assert NO_BATCHES.rows({}) == 1


def test_requests_are_joined_in_order():
    """Every input is joined by name, independent of the order of names in a request."""
    requests = [
        {"x": np.array([[1, 2]], np.int8), "t": np.array([[b"a"]], object)},
        {"t": np.array([[b""], [b"\0"]], object), "x": np.array([[3, 4], [5, 6]], np.int8)},
    ]

    joined = PLAIN.gather(requests)

    assert_equal(
        joined,
        {"x": np.array([[1, 2], [3, 4], [5, 6]], np.int8), "t": np.array([[b"a"], [b""], [b"\0"]], object)},
    )


def test_single_request_is_not_copied():
    """The array of a request that runs alone is the very one the network gets."""
    x = np.zeros((2, 3))

    assert PLAIN.gather([{"x": x}])["x"] is x


def test_single_answer_is_not_copied():
    """The network's output is handed to the only request as it is."""
    y = np.zeros((2, 3))

    (part,) = PLAIN.scatter({"y": y}, [{"x": np.zeros((2, 3))}])

    assert part["y"] is y


def test_parts_of_an_answer_are_views():
    """Cutting an output between requests copies nothing."""
    y = np.arange(6.0).reshape(3, 2)

    parts = PLAIN.scatter({"y": y}, [{"x": np.zeros((1, 2))}, {"x": np.zeros((2, 2))}])

    assert [np.shares_memory(part["y"], y) for part in parts] == [True, True]


@pytest.mark.parametrize("count", [1, 3], ids=["one request", "three requests"])
def test_ragged_inputs_are_joined_flat(count):
    """A ragged input reaches the network as one row of numbers, request after request."""
    batching = Batching(8, frozenset({"x"}), (), {})

    joined = batching.gather(UNLIKE[:count])

    expected = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9][: 2 if count == 1 else 9], np.float32)
    assert_equal(joined, {"x": expected})


def test_single_ragged_request_is_not_copied():
    """Flattening a contiguous array is only another view of it."""
    joined = Batching(8, frozenset({"x"}), (), {}).gather(UNLIKE[:1])

    assert np.shares_memory(joined["x"], UNLIKE[0]["x"])


@pytest.mark.parametrize("dtype", [np.int32, np.float32], ids=["int32", "fp32"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ELEMENT_COUNT", [2, 6, 1]),
        ("ACCUMULATED_ELEMENT_COUNT", [2, 8, 9]),
        ("ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 2, 8, 9]),
    ],
    ids=["element count", "accumulated", "accumulated with zero"],
)
def test_counts_are_made_from_the_batch(kind, expected, dtype):
    """Elements are counted with the batch dimension: two rows of three are six."""
    batching = Batching(8, frozenset({"x"}), (BatchInput("made", kind, "x", dtype),), {})

    joined = batching.gather(UNLIKE)

    assert_equal(joined, {"x": np.arange(1, 10, dtype=np.float32), "made": np.array(expected, dtype)})


def test_largest_count_is_a_shape():
    """The longest request has six elements, so the input has six; what they hold is not defined."""
    batching = Batching(
        8, frozenset({"x"}), (BatchInput("m", "MAX_ELEMENT_COUNT_AS_SHAPE", "x", np.int32),), {}
    )

    joined = batching.gather(UNLIKE)["m"]

    assert (joined.shape, joined.dtype) == ((6,), np.int32)


@pytest.mark.parametrize("dtype", [np.int32, np.float32], ids=["int32", "fp32"])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("ITEM_SHAPE", [[3, 1], [3, 1], [2, 2]]), ("ITEM_SHAPE_FLATTEN", [3, 1, 3, 1, 2, 2])],
    ids=["rows", "flat"],
)
def test_item_shapes_are_the_example_of_the_proto(kind, expected, dtype):
    """A batch-2 input of shape [3, 1] and a batch-1 input of shape [2, 2] are the proto's own example."""
    requests = [{"x": np.zeros((2, 3, 1))}, {"x": np.zeros((1, 2, 2))}]
    batching = Batching(8, frozenset({"x"}), (BatchInput("made", kind, "x", dtype),), {})

    joined = batching.gather(requests)["made"]

    assert_equal({"made": joined}, {"made": np.array(expected, dtype)})


def test_answers_are_cut_by_rows():
    """Each request gets as many rows as it sent, of every output."""
    requests = [{"x": np.zeros((1, 5))}, {"x": np.zeros((0, 5))}, {"x": np.zeros((2, 5))}]
    outputs = {"y": np.array([[1, 2], [3, 4], [5, 6]]), "t": np.array(["a", "b", "c"], object)}

    parts = PLAIN.scatter(outputs, requests)

    for part, expected in zip(
        parts,
        [
            {"y": np.array([[1, 2]]), "t": np.array(["a"], object)},
            {"y": np.zeros((0, 2), int), "t": np.array([], object)},
            {"y": np.array([[3, 4], [5, 6]]), "t": np.array(["b", "c"], object)},
        ],
        strict=True,
    ):
        assert_equal(part, expected)


@pytest.mark.parametrize("count", [1, 3], ids=["one request", "three requests"])
def test_scattered_output_gets_the_shape_of_its_input(count):
    """A scattered output is cut by elements and shaped as the request's input; others are cut by rows."""
    batching = Batching(8, frozenset({"x"}), (), {"y": "x"})
    requests = UNLIKE[:count]
    elements, rows = {1: (2, 1), 3: (9, 4)}[count]

    parts = batching.scatter({"y": 10 * np.arange(1, elements + 1), "n": np.arange(rows)}, requests)

    for part, expected in zip(
        parts,
        [
            {"y": np.array([[10, 20]]), "n": np.array([0])},
            {"y": np.array([[30, 40, 50], [60, 70, 80]]), "n": np.array([1, 2])},
            {"y": np.array([[90]]), "n": np.array([3])},
        ][:count],
        strict=True,
    ):
        assert_equal(part, expected)


@pytest.mark.parametrize(
    ("shape", "printed"),
    [((2, 2), "[2, 2]"), ((4, 2), "[4, 2]"), ((), "[]")],
    ids=["too few", "too many", "scalar"],
)
def test_wrong_number_of_rows_fails_the_run(shape, printed):
    """An output that does not have the rows of the batch cannot be cut, and says so."""
    requests = [{"x": np.zeros((1, 5))}, {"x": np.zeros((2, 5))}]

    with pytest.raises(InferenceFailed) as raised:
        PLAIN.scatter({"y": np.zeros(shape)}, requests)

    assert str(raised.value) == f"inference failed: output 'y': expected 3 rows, got shape {printed}"


def test_wrong_number_of_elements_fails_the_run():
    """A scattered output must have the elements of its input, even for a request that runs alone."""
    batching = Batching(8, frozenset({"x"}), (), {"y": "x"})

    with pytest.raises(InferenceFailed) as raised:
        batching.scatter({"y": np.zeros(3)}, UNLIKE[:1])

    assert str(raised.value) == "inference failed: output 'y': expected 2 rows, got shape [3]"


def test_host_arrays_are_joined_on_the_host():
    """NumPy arrays need no other library, and a single array is not copied."""
    first, second = np.array([[1]], np.uint8), np.array([[2]], np.uint8)

    joined = concatenate([first, second])

    assert concatenate([first]) is first
    assert_equal({"x": joined}, {"x": np.array([[1], [2]], np.uint8)})

"""Joining of requests and splitting of responses; expected values follow model_config.proto."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InferenceFailed, InvalidConfig
from nereid.vision.inference.batching import Batching, BatchInput
from tests.networks import assert_same
from tests.tables import cases, rows

PLAIN = Batching(8, frozenset(), (), {})
SCATTERED = Batching(8, frozenset({"x"}), (), {"y": "x"})
RAGGED = Batching(8, frozenset({"x"}), (), {})
NO_BATCHES = Batching(0, frozenset(), (), {})
# Three requests of x: one row of two, two rows of three, one row of one; 2, 6 and 1 elements.
UNLIKE = [{"x": np.array(x, np.float32)} for x in ([[1, 2]], [[3, 4, 5], [6, 7, 8]], [[9]])]


def config(max_batch_size: int = 8, **document) -> ModelConfig:
    tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": ["-1"], "allow_ragged_batch": True}
    fields = {"name": "m", "max_batch_size": max_batch_size, "input": [tensor], **document}
    return ModelConfig.from_document(fields, Path("/r/m"), 1)


def made(kind: str, datatype: str = "TYPE_FP32", names=("made",)) -> dict:
    return {"kind": kind, "target_name": [*names], "data_type": datatype, "source_input": ["x"]}


def test_config_becomes_a_batching():
    """Protobuf's JSON omits default values, such as the first kind."""
    document = {
        "batch_input": [
            made("BATCH_ELEMENT_COUNT", "TYPE_INT32", ("a", "b")),
            made("BATCH_ITEM_SHAPE", "TYPE_FP32", ("c",)),
            {"target_name": ["d"], "data_type": "TYPE_FP32", "source_input": ["x"]},
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
            BatchInput("d", "ELEMENT_COUNT", "x", np.float32),
        ),
        scattered={"y": "x", "z": "x"},
    )


@cases(kind=("BATCH_OF_COOKIES", "TYPE_FP32"), datatype=("BATCH_ELEMENT_COUNT", "TYPE_INT64"))
def test_unknown_batch_input_is_refused(kind, datatype):
    message = f"'made': expected a kind of .*, BATCH_ITEM_SHAPE_FLATTEN and .* got {kind} and {datatype}$"

    with pytest.raises(InvalidConfig, match=message):
        Batching.from_config(config(batch_input=[made(kind, datatype)]))


@cases(
    plain=(PLAIN, True),
    ragged=(RAGGED, False),
    made_from_the_batch=(replace(PLAIN, batch_inputs=(BatchInput("n", "", "x", np.int32),)), False),
    scattered=(replace(PLAIN, scattered={"y": "x"}), False),
)
def test_only_a_plain_batch_is_cut_between_rows(batching, expected):
    """If an input or output belongs to the batch as a whole, rows are not independent."""
    assert batching.is_by_rows is expected


@cases(
    five_rows=(PLAIN, {"x": np.zeros((5, 3))}, 5),
    without_batches=(NO_BATCHES, {"x": np.zeros((5, 3))}, 1),
    scalar_without_batches=(NO_BATCHES, {"x": np.zeros(())}, 1),
)
def test_rows_are_the_first_dimension(batching, request_, rows):
    assert batching.rows(request_) == rows


def test_requests_are_joined_in_order():
    requests = [
        {"x": np.array([[1, 2]], np.int8), "t": np.array([[b"a"]], object)},
        {"t": np.array([[b""], [b"\0"]], object), "x": np.array([[3, 4], [5, 6]], np.int8)},
    ]

    x, t = np.array([[1, 2], [3, 4], [5, 6]], np.int8), np.array([[b"a"], [b""], [b"\0"]], object)
    assert_same(PLAIN.gather(requests), {"x": x, "t": t})


def test_single_request_is_not_copied():
    x = np.zeros((2, 3))

    assert PLAIN.gather([{"x": x}])["x"] is x
    assert PLAIN.scatter({"y": x}, [{"x": x}])[0]["y"] is x
    flat = RAGGED.gather([{"x": x}])["x"]
    assert (flat.shape, np.shares_memory(flat, x)) == ((6,), True)


# The example of model_config.proto: a request of two items of shape [3, 1], and one of an item of [2, 2].
ITEMS = [{"x": np.zeros((2, 3, 1))}, {"x": np.zeros((1, 2, 2))}]


@pytest.mark.parametrize("dtype", [np.int32, np.float32], ids=["int32", "fp32"])
@rows(
    ("ELEMENT_COUNT", UNLIKE, [2, 6, 1]),
    ("ACCUMULATED_ELEMENT_COUNT", UNLIKE, [2, 8, 9]),
    ("ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", UNLIKE, [0, 2, 8, 9]),
    ("MAX_ELEMENT_COUNT_AS_SHAPE", UNLIKE, [0] * 6),
    ("ITEM_SHAPE", ITEMS, [[3, 1], [3, 1], [2, 2]]),
    ("ITEM_SHAPE_FLATTEN", ITEMS, [3, 1, 3, 1, 2, 2]),
    ids=str,
)
def test_batch_input_is_computed_from_the_batch(kind, requests, expected, dtype):
    batching = Batching(8, frozenset({"x"}), (BatchInput("made", kind, "x", dtype),), {})

    flat = np.concatenate([request["x"].reshape(-1) for request in requests])
    assert_same(batching.gather(requests), {"x": flat, "made": np.array(expected, dtype)})


@pytest.mark.parametrize("count", [1, 3], ids=["one request", "three requests"])
def test_scattered_output_gets_the_shape_of_its_input(count):
    requests, numbers = UNLIKE[:count], [np.array(rows) for rows in ([0], [1, 2], [3])[:count]]
    y = np.concatenate([10 * request["x"].ravel() for request in requests])

    parts = SCATTERED.scatter({"y": y, "n": np.concatenate(numbers)}, requests)

    for part, request, n in zip(parts, requests, numbers, strict=True):
        assert_same(part, {"y": 10 * request["x"], "n": n})


@cases(
    too_many=(PLAIN, UNLIKE, (5, 2), "expected 4 rows, got shape [5, 2]"),
    scalar=(PLAIN, UNLIKE, (), "expected 4 rows, got shape []"),
    scattered_one_request=(SCATTERED, UNLIKE[:1], (3,), "expected 2 rows, got shape [3]"),
)
def test_wrong_number_of_rows_fails_the_run(batching, requests, shape, message):
    with pytest.raises(InferenceFailed, match=f"^inference failed: output 'y': {re.escape(message)}$"):
        batching.scatter({"y": np.zeros(shape)}, requests)

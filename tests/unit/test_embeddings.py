"""Embeddings: comparison of vectors, signals, and results, without a server."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from nereid.base.contract import EMBEDDING
from nereid.base.task_outputs import Comparison, Incomparable
from nereid.base.task_registry import DEFAULT_TASK, make_task_outputs
from nereid.client.result_kind import Timings
from nereid.models.publish.examination import ExaminationRequest
from nereid.tasks.embed.examination import VectorExamination
from nereid.tasks.embed.outputs import cosine_distances
from nereid.tasks.embed.result import EMBEDDINGS
from tests.tables import cases

EMBED = make_task_outputs([EMBEDDING, "variant", "version"])


def rows(*vectors: list[float]) -> dict[str, np.ndarray]:
    return {EMBEDDING: np.array(vectors, np.float32)}


@cases(
    "ours, theirs, expected",
    equal=([3, 4], [3, 4], Comparison(0.0, True)),
    another_length=([3, 4], [6, 8], Comparison(0.0, True)),
    right_angle=([1, 0], [0, 2], Comparison(0.5, False)),
    opposite=([1, 1], [-1, -1], Comparison(1.0, False)),
    at_60_degrees=([1, 0], [0.5, math.sqrt(0.75)], Comparison(0.25, False)),
    cosine_above_99_percent=([1, 0], [0.9901, math.sqrt(1 - 0.9901**2)], Comparison(0.00495, True)),
    cosine_below_99_percent=([1, 0], [0.9899, math.sqrt(1 - 0.9899**2)], Comparison(0.00505, False)),
    large_numbers=([1e30, 0], [1e30, 1e30], Comparison((1 - math.sqrt(0.5)) / 2, False)),
)
def test_distance_is_half_of_one_minus_the_cosine(ours, theirs, expected):
    comparison = EMBED.compare(rows(ours), rows(theirs))

    assert comparison.is_equal is expected.is_equal
    assert comparison.distance == pytest.approx(expected.distance, abs=1e-7)  # FP32 in


def test_the_most_different_image_of_a_batch_decides():
    assert EMBED.compare(rows([1, 0], [1, 0]), rows([1, 0], [0, 1])) == Comparison(0.5, False)


@cases(
    "theirs, message",
    dims=([1.0, 2.0, 3.0], r"expected embeddings \[1, 2\], got \[1, 3\]"),
    NaN=([math.nan, 1.0], "expected finite embeddings"),
    infinity=([math.inf, 1.0], "expected finite embeddings"),
    zeros=([0.0, 0.0], "expected finite embeddings other than zero"),
)
def test_vectors_without_a_direction_do_not_compare(theirs, message):
    """A shadow with NaN has failed, and has not disagreed."""
    with pytest.raises(Incomparable, match=message):
        EMBED.compare(rows([1, 0]), rows(theirs))


vectors = arrays.arrays(np.float32, (4, 16), elements=st.floats(-100, 100, width=32))


@given(vectors, vectors)
def test_distance_is_that_of_the_definition(ours, theirs):
    distances = cosine_distances(ours, theirs)

    for left, right, distance in zip(ours.astype(float), theirs.astype(float), distances, strict=True):
        lengths = math.sqrt(math.fsum(left**2)) * math.sqrt(math.fsum(right**2))
        if lengths < 1e-100:
            continue
        cosine = math.fsum(left * right) / lengths
        assert distance == pytest.approx((1 - cosine) / 2, abs=1e-9)


@cases(
    "vector, expected",
    one_component=([0, 5, 0, 0], 0.25),
    two_of_four=([1, 0, -1, 0], 0.5),
    all_alike=([2, 2, -2, 2], 1.0),
    any_length=([2e15, 2e15, 0, 0], 0.5),
)
def test_signal_is_the_part_of_the_components_that_carry_a_vector(vector, expected):
    signals = EMBED.signals(rows(vector))

    assert signals.of_images == {"confidence": (), "entropy": [pytest.approx(expected)], "found": ()}
    assert signals.attributes == {"dims": 4}


@pytest.mark.parametrize("vector", [[math.nan, 1], [math.inf, 1], [0, 0], [1]], ids=str)
def test_vector_without_a_direction_has_no_signal(vector):
    assert EMBED.signals(rows(vector)) is None


def response_of(array: np.ndarray) -> SimpleNamespace:
    """Return tritonclient's result of an embedding."""
    return SimpleNamespace(as_numpy={EMBEDDING: array}.get, get_response=lambda: {"model_version": "2"})


def test_each_image_gets_its_row():
    response = response_of(np.arange(6, dtype=np.float32).reshape(2, 3))

    assert EMBEDDINGS.is_complete(response, 2)
    one, other = EMBEDDINGS.read(response, "faces", "id", Timings(1, 2))
    assert (one.vector.tolist(), other.vector.tolist()) == ([0, 1, 2], [3, 4, 5])
    assert (one.vector.dtype, one.model, one.version, one.variant) == (np.float32, "faces", "2", "")


@cases("shape, dtype", no_batch=((3,), "f4"), rank=((1, 3, 1), "f4"), datatype=((1, 3), "f8"))
def test_other_forms_are_incomplete(shape, dtype):
    assert not EMBEDDINGS.is_complete(response_of(np.ones(shape, dtype)), 1)


def request(described: str = "", outputs: int = 1, rows: int = 8) -> ExaminationRequest:
    document = {"output": [{"name": f"output{index}"} for index in range(outputs)], "max_batch_size": rows}
    return ExaminationRequest("net", Path("2"), document, preprocess=Path("pre"), described=described)


def test_description_of_a_version_decides_its_task():
    """The outputs of a pinned model may have been renamed."""
    assert request("embed").task.name == "embed"
    assert request("of a later release").task is DEFAULT_TASK


@cases(one=(1, 8, True), several=(2, 8, False), no_batch=(1, 0, False))
def test_only_vectors_of_images_are_compared_as_such(outputs, size, expected):
    assert VectorExamination.fits(request("embed", outputs, size)) is expected

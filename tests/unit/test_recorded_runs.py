"""Runs with buffers that are bound once, on the CPU: the same code that repeats CUDA graphs on a GPU."""

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from nereid.base.serving_errors import InferenceFailed
from nereid.vision.inference.io_binding import RecordedRuns
from tests.networks import constant, network, value

OPTIONS = onnxruntime.RunOptions()


@pytest.fixture(scope="module")
def session():
    model = network(
        [
            helper.make_node("Add", ["x", "x"], ["y"]),
            helper.make_node("ReduceSum", ["x", "axes"], ["total"], keepdims=0),
        ],
        [value("x", "FP32", ["N", "M"])],
        [value("y", "FP32", ["N", "M"]), value("total", "FP32", ["N"])],
        [constant("axes", np.array([1]))],
    )
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def rows(count: int, first: float = 0) -> np.ndarray:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3) + np.float32(first)


def test_results_are_those_of_each_request(session):
    run = RecordedRuns(np, "cpu", 0)
    inputs = [rows(count, first) for first, count in enumerate([2, 1, 2, 4, 1, 2])]

    results = [run(session, {"x": x}, ["total", "y"], OPTIONS) for x in inputs]

    for x, (total, y) in zip(inputs, results, strict=True):
        assert (y.dtype, total.dtype) == (np.float32, np.float32)
        np.testing.assert_array_equal(y, 2 * x)
        np.testing.assert_array_equal(total, x.sum(axis=1))


class Counting:
    def __init__(self) -> None:
        self.shapes = []

    def zeros(self, shape, dtype):
        self.shapes.append(shape)
        return np.zeros(shape, dtype)

    def empty_like(self, array):
        self.shapes.append(array.shape)
        return np.empty_like(array)

    asarray, ascontiguousarray = staticmethod(np.asarray), staticmethod(np.ascontiguousarray)


def test_rows_are_filled_up_to_the_next_size(session):
    counting = Counting()
    run = RecordedRuns(counting, "cpu", 0, sizes=[4, 1])

    for count in (3, 2, 4, 1, 3, 5):
        total, y = run(session, {"x": rows(count, count)}, ["total", "y"], OPTIONS)
        np.testing.assert_array_equal(y, 2 * rows(count, count))
        np.testing.assert_array_equal(total, rows(count, count).sum(axis=1))

    assert counting.shapes == [(4, 3), (4,), (4, 3), (1, 3), (1,), (1, 3), (5, 3), (5,), (5, 3)]


def test_output_without_a_row_for_each_input_is_refused(session):
    """The rows of a request could not be separated from those that fill up, and answers would be wrong."""
    model = network(
        [helper.make_node("Concat", ["x", "x"], ["y"], axis=0)],
        [value("x", "FP32", ["N", "M"])],
        [value("y", "FP32", ["K", "M"])],
    )
    twice = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    with pytest.raises(InferenceFailed, match=r"'y' .*: expected 4 rows for 4 rows .*, got shape \[8, 3"):
        RecordedRuns(np, "cpu", 0, sizes=[4])(twice, {"x": rows(3)}, ["y"], OPTIONS)

    (y,) = RecordedRuns(np, "cpu", 0)(twice, {"x": rows(3)}, ["y"], OPTIONS)
    np.testing.assert_array_equal(y, np.concatenate([rows(3), rows(3)]))


def test_other_outputs_are_another_recording(session):
    run = RecordedRuns(np, "cpu", 0)

    (both, one) = (run(session, {"x": rows(2)}, names, OPTIONS) for names in (["y", "total"], ["total"]))

    assert [each.shape for each in both] == [(2, 3), (2,)]
    assert [each.shape for each in one] == [(2,)]


def test_number_of_recordings_is_limited(session):
    counting = Counting()
    run = RecordedRuns(counting, "cpu", 0, max_recorded=2)

    for count in (1, 2, 3, 4, 3):
        (y,) = run(session, {"x": rows(count)}, ["y"], OPTIONS)
        np.testing.assert_array_equal(y, 2 * rows(count))

    assert counting.shapes == [(1, 3), (1, 3), (2, 3), (2, 3)]


def test_parts_of_a_larger_array_are_copied(session):
    run = RecordedRuns(np, "cpu", 0)
    wide = np.arange(24, dtype=np.float32).reshape(4, 6)

    for _ in range(2):
        (y,) = run(session, {"x": wide[:, ::2]}, ["y"], OPTIONS)
        np.testing.assert_array_equal(y, 2 * wide[:, ::2])

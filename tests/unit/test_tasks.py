"""What a shadow's comparison and the signals of a response say about each task."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereid.base.contract import BOX, CONFIDENCE, FIELD, LABEL, SCORE, SCORES, TEXT
from nereid.base.task_outputs import Comparison, Incomparable
from nereid.base.task_registry import make_task_outputs
from nereid.tasks.classify.outputs import ClassificationOutputs
from nereid.tasks.detect.outputs import DetectionOutputs
from nereid.tasks.read.outputs import FieldOutputs, ReadingOutputs, edit_distance, error_rate
from tests.tables import cases

DETECT, READ, FIELDS = DetectionOutputs(), ReadingOutputs(), FieldOutputs()


def objects(*found: tuple[tuple[float, float, float, float], float, str]) -> dict[str, np.ndarray]:
    return {
        BOX: np.array([detection[0] for detection in found], np.float32).reshape(1, -1, 4),
        SCORE: np.array([[detection[1] for detection in found]], np.float32),
        LABEL: np.array([[detection[2].encode() for detection in found]], object),
    }


def lines(*texts: str, **fields: str) -> dict[str, np.ndarray]:
    documents = [json.dumps({"name": name, "value": value}).encode() for name, value in fields.items()]
    return {
        TEXT: np.array([[text.encode() for text in texts]], object),
        CONFIDENCE: np.full((1, len(texts)), 0.9, np.float32),
        BOX: np.zeros((1, len(texts), 4, 2), np.float32),
        FIELD: np.array([documents], object),
    }


@cases(
    "outputs, kind",
    classifier=([SCORES], ClassificationOutputs),
    detector=([LABEL, BOX, SCORE], DetectionOutputs),
    reader_behind_a_route=([TEXT, CONFIDENCE, BOX, "variant", "version"], ReadingOutputs),
    none=([], ClassificationOutputs),
)
def test_outputs_determine_the_task(outputs, kind):
    assert type(make_task_outputs(outputs)) is kind
    assert isinstance(make_task_outputs([*outputs, FIELD]), FieldOutputs) is (kind is ReadingOutputs)


CUP = ((0, 0, 10, 10), 0.9, "cup")
SAUCER = ((20, 20, 40, 30), 0.6, "saucer")
FAINT = ((50, 50, 60, 60), 0.3, "cup")


@cases(
    "ours, theirs, expected",
    equal=([CUP, SAUCER], [SAUCER, CUP], Comparison(0.0, True)),
    nothing=([], [], Comparison(0.0, True)),
    moved_a_little=([CUP], [((0, 0, 10, 8), 0.8, "cup")], Comparison(0.2, True)),
    moved_away=([CUP], [((8, 0, 18, 10), 0.9, "cup")], Comparison(1.0, False)),
    other_label=([CUP], [((0, 0, 10, 10), 0.9, "mug")], Comparison(1.0, False)),
    one_missing=([CUP, SAUCER], [CUP], Comparison(1 / 3, False)),
    a_faint_one_missing=([CUP, FAINT], [CUP], Comparison(1 / 3, True)),
    found_twice=([CUP], [CUP, CUP], Comparison(1 / 3, False)),
)
def test_detectors_agree_by_their_sure_objects(ours, theirs, expected):
    comparison = DETECT.compare(objects(*ours), objects(*theirs))

    assert comparison.is_equal is expected.is_equal
    assert comparison.distance == pytest.approx(expected.distance)


def test_classes_of_every_image_must_agree():
    ours, theirs = np.float32([[0.9, 0.1], [0.6, 0.4]]), np.float32([[0.9, 0.1], [0.4, 0.6]])

    assert not ClassificationOutputs().compare({"scores": ours}, {"scores": theirs}).is_equal


def test_boxes_that_are_not_numbers_do_not_compare():
    """A shadow with NaN has failed, and has not disagreed."""
    with pytest.raises(Incomparable, match="expected finite boxes"):
        DETECT.compare(objects(CUP), objects(((0, 0, np.nan, 1), 0.9, "cup")))


@cases(
    "ours, theirs, expected",
    equal=(["AB", "12"], ["AB", "12"], Comparison(0.0, True)),
    nothing=([], [], Comparison(0.0, True)),
    one_character=(["AB12"], ["A812"], Comparison(0.25, False)),
    nothing_found=(["AB"], [], Comparison(1.0, False)),
)
def test_readers_agree_by_their_text(ours, theirs, expected):
    assert READ.compare(lines(*ours), lines(*theirs)) == expected


def test_readers_of_fields_agree_by_their_values():
    ours = lines("No 123", "thanks", number="123")

    assert FIELDS.compare(ours, lines("No 123", "thanx", number="123")).is_equal
    assert not FIELDS.compare(ours, lines("No 123", "thanks", number="128")).is_equal


def slow_distance(expected: str, got: str) -> int:
    row = list(range(len(got) + 1))
    for i, left in enumerate(expected, 1):
        new = [i]
        for j, right in enumerate(got, 1):
            new.append(min(row[j] + 1, new[-1] + 1, row[j - 1] + (left != right)))
        row = new
    return row[-1]


@given(st.text("ab文", max_size=12), st.text("ab文", max_size=12))
def test_edit_distance_is_that_of_the_definition(expected, got):
    assert edit_distance(expected, got) == slow_distance(expected, got)


def test_long_texts_are_compared_in_part():
    assert error_rate("a" * 10_000, "a" * 4096 + "b" * 10_000) == 0


def test_signals_count_what_was_found():
    signals, nothing = DETECT.signals(objects(CUP, FAINT)), DETECT.signals(objects())

    assert signals.of_images == {"confidence": [pytest.approx(0.9)], "entropy": (), "found": [2]}
    assert nothing.of_images == {"confidence": (), "entropy": (), "found": [0]}
    assert READ.signals(lines()).found == [0]
    assert DETECT.signals(objects(((0, 0, 1, 1), np.nan, "cup"))) is None


def test_first_output_of_any_model_is_compared():
    task = make_task_outputs(["y", "z"])

    assert isinstance(task, ClassificationOutputs)
    assert task.compare({"y": np.ones((1, 3))}, {"y": np.ones((1, 3))}) == Comparison(0.0, True)
    with pytest.raises(Incomparable, match=r"expected scores \[1, 3\], got \[1, 4\]"):
        task.compare({"y": np.ones((1, 3))}, {"y": np.ones((1, 4))})

"""Signals of responses, against the formulas in float64."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from nereid.backends.routing.observation import RouteQuality
from nereid.base.contract import SCORES
from nereid.tasks.classify.outputs import ClassificationOutputs
from nereid.tasks.read.outputs import ReadingOutputs
from tests.tables import cases

# Sums of 1,000 numbers in FP32.
TOLERANCE = 2e-4
LABELS = {"variant": "v1", "version": "2"}


def expected(row: np.ndarray) -> tuple[float, float, int]:
    wide = [float(value) for value in row]
    if min(wide) < 0 or abs(sum(wide) - 1) > 0.02:
        top = max(wide)
        powers = [math.exp(value - top) for value in wide]
        wide = [power / sum(powers) for power in powers]
    entropy = -sum(value * math.log(value) for value in wide if value > 0) / math.log(len(wide))
    return max(wide), entropy, int(np.argmax(row))


def probabilities(seed: int, shape: tuple[int, int]) -> np.ndarray:
    drawn = np.random.default_rng(seed).random(shape) ** 30
    return (drawn / drawn.sum(1, keepdims=True)).astype(np.float32)


@cases(
    "scores",
    one_of_1000=probabilities(1, (1, 1000)),
    batch=probabilities(2, (8, 10)),
    certain=np.eye(3, dtype=np.float32),
    logits=np.random.default_rng(3).normal(0, 5, (4, 1000)).astype(np.float32),
    large_logits=np.float32([[900, -900], [0, 0]]),
)
def test_signals_are_those_of_the_formulas(scores):
    signals = ClassificationOutputs().signals({SCORES: scores})

    rows = [expected(row) for row in scores]
    assert signals.best == [row[2] for row in rows]
    assert all(0 <= value <= 1 for value in (*signals.confidence, *signals.entropy))
    assert signals.confidence == pytest.approx([row[0] for row in rows], abs=TOLERANCE)
    assert signals.entropy == pytest.approx([row[1] for row in rows], abs=TOLERANCE)


@cases(
    "scores",
    one_class=np.zeros((1, 1), np.float32),
    boxes=np.zeros((1, 3, 4), np.float32),
    float64=np.zeros((1, 5), np.float64),
    text=np.array([[b"a", b"b"]], object),
    nan=np.float32([[np.nan, 1]]),
    empty=np.zeros((0, 5), np.float32),
)
def test_other_outputs_have_no_signals(scores):
    assert ClassificationOutputs().signals({SCORES: scores}) is None


class Sink:
    def __init__(self) -> None:
        self.added: list[tuple[str, float, dict[str, str]]] = []

    def add(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        self.added.append((name, value, labels))

    def set(self, name: str, value: float, /, **labels: str) -> None:
        pytest.fail(name)


def observed(array: object, classes: frozenset[int] | None = None, task: object = None) -> tuple[dict, list]:
    """Return what was observed of a response, and what was added to the metrics."""

    def arrays(response: object, names: Sequence[str]) -> dict[str, object]:
        if isinstance(array, Exception):
            raise array
        return dict.fromkeys(names, array)

    quality = RouteQuality(sink := Sink(), task or ClassificationOutputs())
    quality.use(classes)
    return quality.observe(SimpleNamespace(arrays=arrays), None, LABELS), sink.added


def test_each_task_reports_its_own_signals():
    seen, added = observed(np.float32([[0.5, 1.0]]), frozenset({1}), ReadingOutputs())

    assert seen == {"lines": 2}
    assert added == [("confidence", 0.75, LABELS), ("found", 2, LABELS)]


def test_classes_outside_of_the_reference_are_other():
    """Without a reference no class is counted, so that its values stay few."""
    scores = np.eye(4, dtype=np.float32)[[1, 3]]

    (_, without), (_, with_one) = observed(scores), observed(scores, classes=frozenset({1}))

    assert [sample[0] for sample in without] == ["confidence"] * 2 + ["entropy"] * 2
    assert [sample[2]["class"] for sample in with_one if sample[0] == "predicted_total"] == ["1", "other"]
    assert all(LABELS.items() <= sample[2].items() for sample in with_one)


def test_best_class_of_the_first_image_is_returned():
    scores = np.array([[0.1, 0.7, 0.2], [1, 0, 0]], np.float32)

    for names, label in {("a", "b", "c"): "b", ("a",): "1"}.items():
        (seen, _) = observed(scores, task=ClassificationOutputs(class_names=names))
        assert seen == {"label": label, "confidence": 0.7}


@pytest.mark.parametrize("scores", [RuntimeError("planted"), None, np.zeros((0, 5), np.float32)])
def test_failure_harms_no_request(scores):
    assert observed(scores) == ({}, [])

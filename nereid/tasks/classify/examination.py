"""Numeric outputs, such as scores, compared value by value with the current version's.

Tasks without an examination of their own also use this one.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf
from typing import Any

import numpy as np

from nereid.base.config.model_config import ModelConfig
from nereid.models.publish.examination import (
    Examination,
    ExaminationRequest,
    FirstRun,
    NetworkInput,
    OutputChange,
    Outputs,
    Rejected,
    Samples,
    random_samples,
)
from nereid.models.publish.importing.graph_edits import Activation
from nereid.repository import onnx_graph
from nereid.repository.onnx_file import OnnxFile

# Rounding of a half-precision softmax over 1,000 classes stays below this.
PROBABILITY_SLACK = 0.01
# Operators that preserve the values of a preceding activation.
KEEPING = frozenset({"Cast", "Identity", "Flatten", "Reshape", "Squeeze", "Unsqueeze", "DequantizeLinear"})
SIGMOIDS = frozenset({"Sigmoid", "HardSigmoid"})
TOP = 3
LENGTH_SLACK = 1e-3
# What scores mean, in words.
PROBABILITIES, INDEPENDENT = "probabilities", "independent probabilities"
NUMBER, VECTOR = "one number", "a vector of length 1 (an embedding), as the network returns it"


class ScoreExamination(Examination):
    """Outputs that are returned to callers unchanged."""

    @staticmethod
    def fits(request: ExaminationRequest) -> bool:
        """Return true, because any outputs can be compared as numbers."""
        return True

    def samples(self, config: ModelConfig) -> list[NetworkInput]:
        """Return the golden images if the model has preprocessing, otherwise random inputs."""
        return super().samples(config) if self._request.preprocess else random_samples(config)

    def first_run(self, file: OnnxFile, samples: Samples, outputs: Outputs, can_batch: bool) -> FirstRun:
        """Return the kind of the scores and the top classes."""
        (name,) = outputs[0]
        for sample, arrays in zip(samples, outputs, strict=True):
            if len(arrays[name]) != 1:
                raise Rejected(
                    f"output '{name}' on {sample.name}: expected one row of scores for one image, got shape "
                    f"{list(arrays[name].shape)}; fix: name another output with --output, or export the "
                    "network with a batch of images"
                )
        rows = np.concatenate([output[name] for output in outputs])
        path = self._request.labels
        labels = path.read_text(encoding="utf-8").split("\n") if path else []
        top = tuple(_top(row, labels) for row in rows)
        return FirstRun(can_batch, *meaning_of(rows, last_operator(file.model, name)), top)

    def notes(self, config: ModelConfig, samples: Samples, outputs: Outputs) -> Iterator[str]:
        """Yield a note for each output for images, or with labels, whose scores are not probabilities."""
        noted = set[str]()
        for entry, arrays in product(config.document.get("output", ()), outputs):
            scores = arrays[entry["name"]]
            is_score = self._request.preprocess or entry.get("label_filename")
            if not is_score or scores.dtype.kind != "f" or entry["name"] in noted:
                continue
            total = float(scores.sum(dtype=np.float64)) / (len(scores) if config.max_batch_size else 1)
            rows = scores.reshape(len(scores) if config.max_batch_size else 1, -1)
            if not _are_fractions(rows) and not _have_length_1(rows):
                noted.add(entry["name"])
                yield (
                    f"output '{entry['name']}' does not contain probabilities: expected sum 1, "
                    f"got {total:.3g}; fix: append a softmax with nereid add --activation softmax"
                )

    def changes(self, samples: Samples, before: Outputs, after: Outputs) -> Iterator[OutputChange]:
        """Yield the largest difference of each output."""
        tolerance = self._request.limits.tolerance
        for sample, olds, news in zip(samples, before, after, strict=True):
            for name, old in olds.items():
                text = _describe_change(sample.name, name, old, news[name], tolerance)
                yield OutputChange(difference(old, news[name]), text)


def _top(row: np.ndarray, labels: Sequence[str]) -> tuple[dict[str, Any], ...]:
    indices = map(int, np.argsort(-row, kind="stable")[:TOP])
    return tuple({"index": at, "label": labels[at] if labels else f"class {at}"} for at in indices)


def meaning_of(rows: np.ndarray, operator: str) -> tuple[Activation, str]:
    """Return the activation that turns scores into probabilities (`none` if none does) and their meaning.

    Args:
        rows: scores of several images, float[N, C].
        operator: the operator that computes them, as returned by `last_operator`.
    """
    sums_to_1 = bool(np.all(np.abs(rows.sum(1, dtype=np.float64) - 1) <= PROBABILITY_SLACK))
    if rows.shape[1] == 1:  # a softmax over one class is always 1
        is_activated = _are_fractions(rows) and (operator in SIGMOIDS or not sums_to_1)
        return ("none", INDEPENDENT) if is_activated else ("sigmoid", NUMBER)
    if _have_length_1(rows):
        return "none", VECTOR
    if _are_fractions(rows) and sums_to_1:
        return "none", PROBABILITIES
    if _are_fractions(rows) and operator in SIGMOIDS:
        return "none", INDEPENDENT
    return "softmax", PROBABILITIES


def _are_fractions(rows: np.ndarray) -> bool:
    return bool(rows.min() >= -PROBABILITY_SLACK and rows.max() <= 1 + PROBABILITY_SLACK)


def _have_length_1(rows: np.ndarray) -> bool:
    """Return whether rows are vectors of length 1 in arbitrary directions, as embeddings are."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    return bool(np.all(np.abs(lengths - 1) <= LENGTH_SLACK) and rows.min() < -PROBABILITY_SLACK)


def last_operator(model: Any, output: str) -> str:
    """Return the operator that computes an output, skipping those that only convert or reshape it."""
    producers = {name: node for node in onnx_graph.nodes(model) for name in node.output}
    node = producers.get(output)
    while node is not None and node.op_type in KEEPING:
        node = producers.get(node.input[0])
    return "" if node is None else str(node.op_type)


def difference(before: Any, after: Any) -> float:
    """Return the largest |after - before| relative to the largest |before|; infinity if the shapes differ."""
    if before.shape != after.shape:
        return inf
    if not before.size:
        return 0.0
    if before.dtype.kind == "O":
        return 0.0 if np.array_equal(before, after) else inf
    old, new = before.astype(np.float64), after.astype(np.float64)
    change, size = np.abs(new - old).max(), np.abs(old).max()
    if not change:
        return 0.0
    return float(change / size) if size else inf


def _describe_change(sample: str, name: str, before: Any, after: Any, tolerance: float) -> str:
    """Describe how an output differs from the current version's, with the top classes of both."""
    if before.shape != after.shape:
        return f"output '{name}' on {sample}: expected shape {list(before.shape)}, got {list(after.shape)}"
    text = (
        f"output '{name}' on {sample}: expected a difference of at most {tolerance:g} of the current "
        f"version's largest value, got {difference(before, after):.3g}"
    )
    if before.dtype.kind == "O" or before.size < 2:
        return text
    return f"{text} (top class {int(before.argmax())} before, {int(after.argmax())} now)"

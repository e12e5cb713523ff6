"""Comparison of a network's outputs with those of the current version."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import numpy as np

from nereid.config.model_config import ModelConfig
from nereid.publish.examination.examine import ExaminationRequest, Rejected
from nereid.publish.examination.measurements import Network
from nereid.publish.examination.samples import Arrays, Sample

# Rounding of a softmax in half precision over 1,000 classes stays below this.
PROBABILITY_SLACK = 0.01


def check_outputs(
    request: ExaminationRequest,
    network: Network,
    current: Network | None,
    samples: Sequence[Sample],
    notes: list[str],
) -> float | None:
    """Compare the outputs with those of the current version; return the largest difference.

    Raises:
        Rejected: an output is not finite, or differs by more than the tolerance.
    """
    changes = []
    for sample in samples:
        outputs = network.run(sample)
        _check_finite(outputs, sample.name)
        notes += _notes_of_scores(request, network.config, outputs)
        for name, before in current.run(sample).items() if current else ():
            changes.append((difference(before, outputs[name]), sample.name, name, before, outputs[name]))
    if not changes:
        return None
    greatest, where, name, before, after = max(changes, key=lambda each: each[0])
    tolerance = request.gates.tolerance
    if greatest > tolerance:
        text = _describe_change(where, name, before, after, tolerance)
        if not request.gates.is_change_accepted:
            raise Rejected(f"{text}; fix: publish it with --accept-change if the difference is intended")
        notes.append(f"accepted difference: {text}")
    return greatest


def _check_finite(outputs: Arrays, sample: str) -> None:
    for name, array in outputs.items():
        if array.dtype.kind == "f" and (bad := int((~np.isfinite(array)).sum())):
            raise Rejected(
                f"output '{name}' on {sample}: expected finite numbers, got NaN or infinity in "
                f"{bad:,} of {array.size:,} values"
            )


def _notes_of_scores(request: ExaminationRequest, config: ModelConfig, outputs: Arrays) -> Iterator[str]:
    """Yield a note if scores are not probabilities; scores are outputs for images, or with labels."""
    for entry in config.document.get("output", ()):
        scores = outputs[entry["name"]]
        is_score = request.preprocess or entry.get("label_filename")
        if not is_score or scores.dtype.kind != "f":
            continue
        total = float(scores.sum(dtype=np.float64)) / (len(scores) if config.max_batch_size else 1)
        if abs(total - 1) > PROBABILITY_SLACK or scores.min() < 0:
            yield (
                f"output '{entry['name']}' does not contain probabilities: expected sum 1, got {total:.3g}; "
                "fix: append a softmax with nereid add --activation softmax"
            )


def difference(before: Any, after: Any) -> float:
    """Return the largest |after - before|, relative to the largest |before|; infinity for another shape."""
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
    """Return the difference of an output from the current version as text, with both top classes."""
    if before.shape != after.shape:
        return f"output '{name}' on {sample}: expected shape {list(before.shape)}, got {list(after.shape)}"
    text = (
        f"output '{name}' on {sample}: expected a difference of at most {tolerance:g} of the current "
        f"version's largest value, got {difference(before, after):.3g}"
    )
    if before.dtype.kind == "O" or before.size < 2:
        return text
    return f"{text} (top class {int(before.argmax())} before, {int(after.argmax())} now)"

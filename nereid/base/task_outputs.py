"""The interface of a task: everything that routes, shadows and drift need to know about it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

# Output tensors of one response, by name.
Arrays: TypeAlias = Mapping[str, np.ndarray]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Convert logits to probabilities, float[N, classes]."""
    powers = np.exp(logits - logits.max(1, keepdims=True))
    result: np.ndarray = powers / powers.sum(1, keepdims=True)
    return result


class Incomparable(ValueError):
    """Two responses cannot be compared: expected is the variant's form, got is the shadow's."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far apart two responses are.

    Attributes:
        distance: 0 for equal responses, at most 1; what it measures depends on the task.
        is_equal: whether both tell the user the same thing.
    """

    distance: float
    is_equal: bool


@dataclass(frozen=True, slots=True)
class QualitySignals:
    """Signals of a batch's response; a list is empty if the task has no such signal.

    Attributes:
        confidence: 0..1, for each image in which something was found.
        entropy: 0..1, for each image.
        best: index of the best class of each image.
        found: number of lines or objects in each image.
        attributes: attributes for the request's trace.
    """

    confidence: Sequence[float] = ()
    entropy: Sequence[float] = ()
    best: Sequence[int] = ()
    found: Sequence[int] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def of_images(self) -> Mapping[str, Sequence[float]]:
        """The signals that have a distribution, by metric name."""
        return {"confidence": self.confidence, "entropy": self.entropy, "found": self.found}


def signals_of_findings(
    confidences: np.ndarray, statistic: Callable[[np.ndarray], float], unit: str
) -> QualitySignals | None:
    """Return a statistic of an image's confidences, and their number; None if they are not finite."""
    if not np.isfinite(confidences).all():
        return None
    count = confidences.size
    confidence = [min(1.0, float(statistic(confidences)))] if count else ()
    return QualitySignals(confidence, found=[count], attributes={unit: count})


class TaskOutputs(Protocol):
    """A task."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Tensors of a model of this task that are compared and measured."""

    def compare(self, variant: Arrays, shadow: Arrays) -> Comparison:
        """Compare a variant's response with a shadow's; raises Incomparable."""

    def signals(self, outputs: Arrays) -> QualitySignals | None:
        """Return the signals of a response; None if they cannot be measured."""

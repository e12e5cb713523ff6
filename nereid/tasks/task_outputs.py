"""The interface of a task: all that routes, shadows and drift need to know about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

# Output tensors of one response, by name.
Arrays: TypeAlias = Mapping[str, np.ndarray]


class Incomparable(ValueError):
    """Two responses cannot be compared: expected is the variant's form, got is the shadow's."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far two responses are apart.

    Attributes:
        distance: 0 for equal responses, and at most 1; what it measures depends on the task.
        is_equal: whether both say the same to their user.
    """

    distance: float
    is_equal: bool


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals of the response to a batch; a list is empty if the task has no such signal.

    Attributes:
        confidence: 0..1, of each image with something found.
        entropy: 0..1, of each image.
        best: index of the best class of each image.
        found: number of lines or objects of each image.
        about: attributes for the trace of the request.
    """

    confidence: Sequence[float] = ()
    entropy: Sequence[float] = ()
    best: Sequence[int] = ()
    found: Sequence[int] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def of_images(self) -> Mapping[str, Sequence[float]]:
        """The signals with a distribution, by the names of their metrics."""
        return {"confidence": self.confidence, "entropy": self.entropy, "found": self.found}


class TaskOutputs(Protocol):
    """A task."""

    @property
    def name(self) -> str:
        """Its name, as in `nereid add --task NAME`."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Tensors that a model of the task has; those that are compared and measured."""

    def compare(self, ours: Arrays, theirs: Arrays) -> Comparison:
        """Compare the response of a variant with that of a shadow; raises Incomparable."""

    def signals(self, outputs: Arrays) -> Signals | None:
        """Return the signals of a response; None if it cannot be measured."""

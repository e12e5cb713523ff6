"""One measurement of one cell."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """What a cell gave in one round.

    `cpu_ms` is CPU time per image of what did the work, `memory_mb` the memory (PSS) of its processes; a
    generator's own are in neither.
    """

    rate: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    cpu_ms: float
    memory_mb: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest value that so many per cent of all do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

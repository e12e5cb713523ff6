"""One measurement of one cell."""

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

    def slack(self, concurrency: int) -> float:
        """Return p99 by concurrency / throughput, which is what requests that all wait alike would take."""
        return self.p99_ms / 1e3 * self.rate / concurrency

"""The objective of a search: images per second at saturation, or the latency of a single caller."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

from nereid.insight.tune.load_generator import Load

# The results of one measurement of a candidate, by concurrency.
Loads: TypeAlias = Mapping[int, Load]
Kind = Literal["throughput", "latency"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The number that candidates are compared by, subject to a p99 of at most `p99_ms`.

    `throughput` is the highest rate among the concurrencies that meet the p99. `latency` is the median at
    concurrency 1, because in a few seconds a p99 rests on a handful of requests.
    """

    kind: Kind
    p99_ms: float = float("inf")

    def is_met(self, load: Load) -> bool:
        """Return whether the p99 is low enough."""
        return 0 < load.p99_ms <= self.p99_ms

    def concurrency(self, loads: Loads) -> int:
        """Return the concurrency that counts: the best with a low p99, else the lowest p99."""
        if self.kind == "latency":
            return min(loads)
        met = [number for number, load in loads.items() if self.is_met(load)]
        if met:
            return max(met, key=lambda number: loads[number].rate)
        return min(loads, key=lambda number: loads[number].p99_ms)

    def rank(self, loads: Loads) -> tuple[bool, float]:
        """Return a key that sorts better loads first: by value if the p99 is met, else by the p99."""
        load = loads[self.concurrency(loads)]
        if not self.is_met(load):
            return True, load.p99_ms
        return False, -load.rate if self.kind == "throughput" else load.p50_ms

    def ratio(self, load: Load, other: Load) -> float:
        """Return the factor by which one load is better than another."""
        return load.rate / other.rate if self.kind == "throughput" else other.p50_ms / load.p50_ms

    def __str__(self) -> str:
        name = "images/s at saturation" if self.kind == "throughput" else "p50 at concurrency 1"
        return name + (f", p99 <= {self.p99_ms:g} ms" if self.p99_ms < float("inf") else "")


def median(measured: Sequence[Loads]) -> Loads:
    """Return the median over measurements, separately for each number."""
    return {
        number: Load(
            **{
                field.name: statistics.median(getattr(loads[number], field.name) for loads in measured)
                for field in fields(Load)
            }
        )
        for number in measured[0]
    }

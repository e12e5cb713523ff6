"""The choice of the models to probe: those that have answered no request recently. Pure, without a clock."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

LOOK_S = 2.0
# A model without requests is probed this long after its last answer.
IDLE_S = 4.0
# So is a model with requests: of two instances, one may hang while the other answers, and Triton 24.10 counts
# answers that are errors as successes.
BUSY_S = 10.0


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests to a model that succeeded and failed since it was loaded, by Triton's statistics."""

    succeeded: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Model:
    """The requests and probes of one model."""

    counts: Counts = Counts()
    answered_s: float = -inf
    probed_s: float = -inf
    is_suspect: bool = True
    has_failed_probe: bool = False

    def look(self, counts: Counts, now_s: float) -> bool:
        """Apply new counts; returns whether the model has only answered since the last ones."""
        before, self.counts = self.counts, counts
        if counts.succeeded < before.succeeded or counts.failed < before.failed:  # it was loaded again
            before = Counts()
        if counts.failed > before.failed:
            self.is_suspect = True
        elif counts.succeeded > before.succeeded:
            self.is_suspect, self.answered_s = False, now_s
            return not self.has_failed_probe
        return False

    def due_s(self) -> float:
        """Return the time of the next probe."""
        if self.is_urgent:
            return -inf
        return min(max(self.answered_s, self.probed_s) + IDLE_S, self.probed_s + BUSY_S)

    @property
    def is_urgent(self) -> bool:
        """Whether the model is probed at every look."""
        return self.is_suspect or self.has_failed_probe


class Activity:
    """The models of one server that take images; not thread-safe."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def look(self, counts: Mapping[str, Counts], now_s: float) -> set[str]:
        """Apply the counts of all models; returns those that have answered requests since the last look."""
        self._models = {name: self._models.get(name) or _Model(probed_s=now_s) for name in counts}
        return {name for name, each in counts.items() if self._models[name].look(each, now_s)}

    def take_due(self, now_s: float) -> set[str]:
        """Return the models to probe now.

        Those that failed, or never answered, come all together. Of the others, only as many come as keep the
        pace: a probe of a route is also an answer of its variant, which is then no longer due.
        """
        due = [name for name, model in self._models.items() if model.due_s() <= now_s]
        due.sort(key=lambda name: (self._models[name].due_s(), name))
        urgent = sum(self._models[name].is_urgent for name in due)
        taken = due[: urgent + max(1, int(len(self._models) * LOOK_S / IDLE_S))]
        for name in taken:
            self._models[name].probed_s = now_s
        return set(taken)

    def probed(self, model: str, is_success: bool) -> None:
        """Record the end of a probe; after a failure, the model is probed until a probe succeeds."""
        if model in self._models:
            self._models[model].has_failed_probe = not is_success


def read_counts(statistics: Mapping[str, Any]) -> tuple[dict[str, set[int]], dict[str, Counts]]:
    """Return the ready versions and the counts, by model, of Triton's answer to `/v2/models/stats`."""
    ready: dict[str, set[int]] = {}
    counts: dict[str, Counts] = {}
    for entry in statistics["model_stats"]:
        name, outcomes = entry["name"], entry["inference_stats"]
        ready.setdefault(name, set()).add(int(entry["version"]))
        before = counts.get(name, Counts())
        counts[name] = Counts(
            before.succeeded + outcomes["success"]["count"], before.failed + outcomes["fail"]["count"]
        )
    return ready, counts

"""What the requests of each key measurably cost, compared with those of other keys.

Triton 24.10 returns no time of a single request: responses have no parameters, and one more output would
change what clients of the v2 protocol see. So the measure is the time in flight, beyond what other keys have
at the same time. Requests that are in flight together share it: many cheap ones wait for each other.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from nereid.base.processes import available_cores
from nereid.vision.imaging.formats.size import LARGE_WORK

# Seconds in flight over which a mean is formed: cheap requests hide no expensive one.
HORIZON_S = 10.0
# A key that was idle for so long is not known any more, nor is it compared with.
MEMORY_S = 60.0
# A request that takes so long can keep a core busy alone. Nobody knows how long the server works on one whose
# caller has left; it is taken for `PATIENCE_S`, in which a core reads a page of the most lines.
SLOW_S, PATIENCE_S = 0.1, 5.0
# Models, which callers of the v2 protocol name, and keys that a key is compared with.
MAX_MODELS, MAX_OTHERS = 256, 32


@dataclass(slots=True)
class _Mean:
    """Seconds per unit of work, where each second in flight counts alike.

    Attributes:
        in_flight_s: from admission to response.
        share_s: the same, divided by the number of requests in flight.
        at_s: when it was last changed.
    """

    in_flight_s: float
    share_s: float
    at_s: float


class Costs:
    """Mean times in flight per unit of work, by model and key; pure.

    Args:
        clock: monotonic time in seconds.
        cores: those of the server; 0 for those of this machine.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, cores: int = 0) -> None:
        self._clock, self._half = clock, max(1, (cores or available_cores()) // 2)
        # The last changed model, and the last changed key of each model, are the last.
        self._means: dict[str, dict[str, _Mean]] = {}

    def most_in_flight(self, owner: str, model: str) -> int:
        """Return how many requests of a key to a model may be in flight, so that others find an instance.

        One until it is known what they take, and half of the cores if that is much.
        """
        means = self._recent(model)
        if not owner or not means.keys() - {owner}:
            return sys.maxsize
        if owner not in means:
            return 1
        return self._half if self.is_slow(owner, model) else sys.maxsize

    def is_slow(self, owner: str, model: str) -> bool:
        """Return whether other keys use a model too, and the requests of a key or of the others take long."""
        means = self._recent(model)
        others = [mean.share_s for mean in self._others(owner, means)]
        own = means[owner].share_s if owner in means else 0.0
        return bool(others) and max(own, _median(others)) >= SLOW_S

    def is_costly(self, owner: str, model: str) -> bool:
        """Return whether the requests of a key cost as much as large images, whatever they declare."""
        means = self._recent(model)
        mean = means.get(owner)
        return mean is not None and mean.share_s >= LARGE_WORK * self._typical_s(owner, means, mean)

    def expected_s(self, owner: str, model: str) -> float:
        """Return the mean time of a key per unit of work; 0 if it is not known."""
        mean = self._recent(model).get(owner)
        return mean.in_flight_s if mean else 0.0

    def note(
        self,
        owner: str,
        model: str,
        seconds: float,
        work: int,
        in_flight: int = 1,
        is_answered: bool = True,
    ) -> int:
        """Record a request; return the units that it cost beyond the declared ones.

        Args:
            owner: the id of its key; empty without a key.
            model: its model.
            seconds: its time in flight.
            work: the units that it declared, of a small photo each.
            in_flight: the number of requests in flight when it was sent, with it.
            is_answered: whether it has a result. Else it says nothing about the time that others would take:
                it was refused early, or the server still works on it.
        """
        if not owner:
            return 0
        now_s, means = self._clock(), self._recent(model)
        each_s, share_s = seconds / work, seconds / work / in_flight
        mean = means.pop(owner, None)
        units = share_s / self._typical_s(owner, means, mean or _Mean(each_s, share_s, now_s)) * work
        if is_answered:
            mean = mean or _Mean(each_s, share_s, now_s)
        if mean and (is_answered or each_s > mean.in_flight_s):
            weight = seconds / (seconds + HORIZON_S)
            mean.in_flight_s += weight * (each_s - mean.in_flight_s)
            mean.share_s += weight * (share_s - mean.share_s)
        if mean:
            self._keep(owner, model, means, mean, now_s)
        return int(units) - work if units >= LARGE_WORK * work else 0

    def _keep(self, owner: str, model: str, means: dict[str, _Mean], mean: _Mean, now_s: float) -> None:
        means[owner], mean.at_s = mean, now_s
        self._means.pop(model, None)
        self._means[model] = means
        if len(self._means) > MAX_MODELS:
            del self._means[next(iter(self._means))]

    def _recent(self, model: str) -> dict[str, _Mean]:
        """Return the means of the keys that used a model lately; the others are forgotten."""
        means, oldest_s = self._means.get(model, {}), self._clock() - MEMORY_S
        while means and means[oldest := next(iter(means))].at_s < oldest_s:
            del means[oldest]
        return means

    def _typical_s(self, owner: str, means: dict[str, _Mean], own: _Mean) -> float:
        """Return the median of other keys, or the mean of the only key; but what a photo may take."""
        others = [mean.in_flight_s for mean in self._others(owner, means)]
        return max(SLOW_S / LARGE_WORK, _median(others) if others else own.in_flight_s)

    def _others(self, owner: str, means: dict[str, _Mean]) -> list[_Mean]:
        last = islice(reversed(means.items()), MAX_OTHERS)
        return [mean for name, mean in last if name != owner]


def _median(numbers: list[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]

"""Shadows of a route: models that are asked the same after a variant has answered, and compared with it."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from python_backend.errors import InferenceFailed
from python_backend.exchange import BoundedLabels, Counts, Exchange
from python_backend.routing import Route, Shadow, Variant, is_mirrored


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that has its answer: the variant's, after so many seconds; `key` is its sticky one."""

    exchange: Exchange
    route: Route
    variant: Variant
    response: Any
    seconds: float
    key: str


class Shadows:
    """Mirrors requests, in the thread that has answered them; nobody waits for that.

    Args:
        counts: what is counted.
        log: takes a line about a shadow that fails.
        clock: seconds that never go back.
        draw: random numbers in [0, 1).
    """

    def __init__(
        self,
        counts: Counts,
        log: Callable[[str], None],
        clock: Callable[[], float],
        draw: Callable[[], float],
    ) -> None:
        self._counts, self._log, self._clock, self._draw = counts, log, clock, draw
        self._lock = Lock()
        self._label = BoundedLabels()
        self._mirroring = 0
        self._reported: set[str] = set()

    def mirror(self, answered: Answered, in_flight: Callable[[], int]) -> None:
        """Ask the shadows that the request is meant for, unless the route is busy.

        Args:
            answered: the request, and its answer.
            in_flight: how many requests wait for theirs: these go first.
        """
        route, variant = answered.route, answered.variant
        for shadow in route.shadows:
            is_itself = (shadow.model, shadow.version) == (variant.model, variant.version)
            if is_itself or not is_mirrored(shadow, route.salts.shadows, answered.key, self._draw()):
                continue
            outcome = "shed"
            if self._begin(in_flight(), route.shadow_max_in_flight):
                try:
                    outcome = self._compare(answered, shadow)
                finally:
                    self._end()
            (label,) = self._label(shadow.name)
            self._counts.add("shadow_requests_total", shadow=label, outcome=outcome)

    def _begin(self, in_flight: int, limit: int) -> bool:
        with self._lock:
            if in_flight + self._mirroring >= limit:
                return False
            self._mirroring += 1
            return True

    def _end(self) -> None:
        with self._lock:
            self._mirroring -= 1

    def _compare(self, answered: Answered, shadow: Shadow) -> str:
        """Ask the shadow; returns the outcome."""
        exchange, begin = answered.exchange, self._clock()
        try:
            response = exchange.call(shadow.model, shadow.version, shadow.deadline_ms / 1e3)
            seconds = self._clock() - begin
            ours, theirs = exchange.scores(answered.response), exchange.scores(response)
            distance = _distance(ours, theirs)
        except Exception as error:
            self._report(f"shadow '{shadow.name}' failed: {error}")
            return "failed"
        (label,) = self._label(shadow.name)
        self._counts.add("shadow_score_distance", distance, shadow=label)
        self._counts.add("shadow_duration_seconds", seconds, shadow=label)
        self._counts.add("shadowed_duration_seconds", answered.seconds, shadow=label)
        return "agreed" if np.array_equal(ours.argmax(-1), theirs.argmax(-1)) else "disagreed"

    def _report(self, line: str) -> None:
        """Log a line, but each only once, and not for ever."""
        if line not in self._reported and len(self._reported) < BoundedLabels.MOST:
            self._reported.add(line)
            self._log(line)


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference of one score; raises InferenceFailed where there is none."""
    if ours.shape != theirs.shape or not np.isfinite(theirs).all():
        raise InferenceFailed(f"expected {list(ours.shape)} finite scores, got {list(theirs.shape)}")
    return float(np.abs(ours.astype(np.float64) - theirs).max(initial=0.0))

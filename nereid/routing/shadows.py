"""Shadows of a route: models that are asked the same after a variant has answered, and compared with it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from nereid.routing.assignment import Route, Shadow, Variant, is_mirrored
from nereid.routing.attempts import MOST_LATE, BoundedLabels, Counts, Exchange
from nereid.serving_errors import DeadlineExceeded, InferenceFailed

REPORT_EVERY_S = 60.0


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
        self._mirrors: set[_Mirror] = set()
        self._late: Counter[str] = Counter()
        self._reported_at: dict[str, float] = {}

    def mirror(self, answered: Answered, in_flight: Callable[[], int]) -> None:
        """Ask the shadows that the request is meant for, one after the other, unless the route is busy.

        Args:
            answered: the request, and its answer.
            in_flight: how many requests wait for theirs: these go first.
        """
        route, variant = answered.route, answered.variant
        for shadow in route.shadows:
            is_itself = (shadow.model, shadow.version) == (variant.model, variant.version)
            if is_itself or not is_mirrored(shadow, route.salts.shadows, answered.key, self._draw()):
                continue
            if mirror := self._begin(answered, shadow, in_flight()):
                self._compare(mirror)
            else:
                self._count(shadow, "shed")

    def expire(self) -> None:
        """Give up what is past its deadline: it counts as failed and keeps no other from being mirrored."""
        now = self._clock()
        with self._lock:
            late = [mirror for mirror in self._mirrors if now >= mirror.deadline]
            for mirror in late:
                self._mirrors.remove(mirror)
                self._late[mirror.shadow.name] += 1
        for mirror in late:
            self._fail(mirror.shadow, mirror.late_error())

    def _begin(self, answered: Answered, shadow: Shadow, in_flight: int) -> "_Mirror | None":
        with self._lock:
            is_busy = in_flight + len(self._mirrors) >= answered.route.shadow_max_in_flight
            if is_busy or self._late[shadow.name] >= MOST_LATE:
                return None
            mirror = _Mirror(answered, shadow, self._clock())
            self._mirrors.add(mirror)
            return mirror

    def _end(self, mirror: "_Mirror") -> bool:
        """Take note of a mirrored request that has come back; returns False if it was given up before."""
        with self._lock:
            if mirror in self._mirrors:
                self._mirrors.remove(mirror)
                return True
            self._late[mirror.shadow.name] -= 1
            return False

    def _compare(self, mirror: "_Mirror") -> None:
        """Ask the shadow, and compare its answer with the variant's."""
        answered, shadow = mirror.answered, mirror.shadow
        exchange, response, error = answered.exchange, None, None
        try:
            response = exchange.call(shadow.model, shadow.version, shadow.deadline_ms / 1e3)
        except Exception as raised:
            error = raised
        seconds = self._clock() - mirror.begin
        if not self._end(mirror):
            return
        try:
            if error or self._clock() >= mirror.deadline:
                raise error or mirror.late_error()
            ours, theirs = exchange.scores(answered.response), exchange.scores(response)
            distance = _distance(ours, theirs)
        except Exception as raised:
            self._fail(shadow, raised)
            return
        (label,) = self._label(shadow.name)
        self._counts.add("shadow_score_distance", distance, shadow=label)
        self._counts.add("shadow_duration_seconds", seconds, shadow=label)
        self._counts.add("shadowed_duration_seconds", answered.seconds, shadow=label)
        is_equal = np.array_equal(ours.argmax(-1), theirs.argmax(-1))
        self._count(shadow, "agreed" if is_equal else "disagreed")

    def _count(self, shadow: Shadow, outcome: str) -> None:
        (label,) = self._label(shadow.name)
        self._counts.add("shadow_requests_total", shadow=label, outcome=outcome)

    def _fail(self, shadow: Shadow, reason: object) -> None:
        """Count a failure, and log it unless another one of this shadow was a moment ago."""
        self._count(shadow, "failed")
        (label,), now = self._label(shadow.name), self._clock()
        with self._lock:
            is_news = now - self._reported_at.get(label, -REPORT_EVERY_S) >= REPORT_EVERY_S
            if is_news:
                self._reported_at[label] = now
        if is_news:
            self._log(f"shadow '{shadow.name}' failed: {reason}")


class _Mirror:
    """A request that is being mirrored to one shadow."""

    def __init__(self, answered: Answered, shadow: Shadow, begin: float) -> None:
        self.answered, self.shadow, self.begin = answered, shadow, begin
        self.deadline = begin + shadow.deadline_ms / 1e3

    def late_error(self) -> DeadlineExceeded:
        """Return what has happened past the deadline."""
        return DeadlineExceeded(f"no answer in {self.shadow.deadline_ms} ms")


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference of one score; raises InferenceFailed where there is none."""
    if ours.shape != theirs.shape:
        raise InferenceFailed(f"expected scores {list(ours.shape)}, got {list(theirs.shape)}")
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        raise InferenceFailed("scores that are no numbers cannot be compared")
    return float(np.abs(ours.astype(np.float64) - theirs).max(initial=0.0))

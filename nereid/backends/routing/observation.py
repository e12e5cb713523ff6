"""Measurements of served requests: signals of response quality, and comparisons with shadows."""

from collections import Counter
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any

from nereid.backends.routing.assignment import Shadow, is_mirrored
from nereid.backends.routing.attempts import Attempt
from nereid.backends.routing.interfaces import MAX_LATE, BoundedLabels, MetricSink, RoutedRequest
from nereid.base.errors import DeadlineExceeded
from nereid.base.task_outputs import QualitySignals, TaskOutputs

OTHER = "other"
# Attributes for the trace of a request.
Attributes = Mapping[str, Any]
Observe = Callable[[RoutedRequest, Any, Mapping[str, str]], Attributes]


class RouteQuality:
    """Measures the responses of a route.

    Args:
        metrics: receives `confidence`, `entropy`, `found` and `predicted_total`.
        task: the task of the route's variants.
    """

    def __init__(self, metrics: MetricSink, task: TaskOutputs) -> None:
        self._metrics, self._task = metrics, task
        self._classes: frozenset[int] | None = None

    def use(self, classes: frozenset[int] | None) -> None:
        """Count the best classes that are in `classes` by index; None counts no classes."""
        self._classes = classes

    def observe(self, request: RoutedRequest, response: Any, labels: Mapping[str, str]) -> Attributes:
        """Measure a response that was sent; a failure here never harms a request.

        Args:
            request, response: the request, and the variant's response.
            labels: variant and version, as the route's metrics have them.

        Returns:
            What the first image shows, such as best class and confidence.
        """
        try:
            signals = self._task.signals(request.arrays(response, self._task.outputs))
            if signals is None:
                return {}
            self._add(signals, labels)
            return signals.attributes
        except Exception:  # the client has its response
            return {}

    def _add(self, signals: QualitySignals, labels: Mapping[str, str]) -> None:
        for name, values in signals.of_images.items():
            for value in values:
                self._metrics.add(name, value, **labels)
        if (classes := self._classes) is not None:
            for best in signals.best:
                name = str(best) if best in classes else OTHER
                self._metrics.add("predicted_total", **labels, **{"class": name})


REPORT_EVERY_S = 60.0


class Shadows:
    """Mirrors requests in the thread that served them, after the client has its response.

    Args:
        task: compares two responses.
        metrics: receives outcomes, distances and durations.
        log: receives a line when a shadow fails.
        clock: seconds of a monotonic clock.
        random_unit: random numbers in [0, 1).
        in_flight: returns the number of the route's requests in flight.
    """

    def __init__(
        self,
        task: TaskOutputs,
        metrics: MetricSink,
        log: Callable[[str], None],
        clock: Callable[[], float],
        random_unit: Callable[[], float],
        in_flight: Callable[[], int],
    ) -> None:
        self._task, self._in_flight = task, in_flight
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._random_unit = random_unit
        self._lock = Lock()
        self._label = BoundedLabels()
        self._mirrors: set[_Mirror] = set()
        self._late: Counter[str] = Counter()
        self._reported_at: dict[str, float] = {}

    def mirror(self, attempt: Attempt, response: Any) -> None:
        """Send a served request to its shadows in turn, unless too many requests are in flight."""
        route, variant, key = attempt.admitted.loaded.route, attempt.variant, attempt.admitted.key
        for shadow in route.shadows:
            is_itself = (shadow.model, shadow.version) == (variant.model, variant.version)
            if is_itself or not is_mirrored(shadow, route.salts.shadows, key, self._random_unit()):
                continue
            if mirror := self._begin(attempt, response, shadow):
                self._compare(mirror)
            else:
                self._count(shadow, "shed")

    def expire(self) -> None:
        """Give up mirrored requests past their deadline: they count as failed and free their slot."""
        now = self._clock()
        with self._lock:
            late = [mirror for mirror in self._mirrors if now >= mirror.deadline]
            for mirror in late:
                self._mirrors.remove(mirror)
                self._late[mirror.shadow.name] += 1
        for mirror in late:
            self._fail(mirror.shadow, mirror.late_error())

    def _begin(self, attempt: Attempt, response: Any, shadow: Shadow) -> "_Mirror | None":
        in_flight, limit = self._in_flight(), attempt.admitted.loaded.route.shadow_max_in_flight
        with self._lock:
            if in_flight + len(self._mirrors) >= limit or self._late[shadow.name] >= MAX_LATE:
                return None
            mirror = _Mirror(attempt, response, shadow, self._clock())
            self._mirrors.add(mirror)
            return mirror

    def _end(self, mirror: "_Mirror") -> bool:
        with self._lock:
            if mirror in self._mirrors:
                self._mirrors.remove(mirror)
                return True
            self._late[mirror.shadow.name] -= 1
            return False

    def _compare(self, mirror: "_Mirror") -> None:
        attempt, shadow = mirror.attempt, mirror.shadow
        request, trace = attempt.admitted.request, attempt.admitted.trace
        response, error, span = None, None, trace.shadow(shadow.name)
        try:
            parameters = trace.parameters(span)
            response = request.forward(shadow.model, shadow.version, shadow.deadline_ms / 1e3, parameters)
        except Exception as raised:
            error = raised
        trace.end_shadow(span, error)
        seconds = self._clock() - mirror.started_at
        if not self._end(mirror):
            return
        try:
            if error or self._clock() >= mirror.deadline:
                raise error or mirror.late_error()
            variant_outputs, shadow_outputs = (
                request.arrays(result, self._task.outputs) for result in (mirror.response, response)
            )
            comparison = self._task.compare(variant_outputs, shadow_outputs)
        except Exception as raised:
            self._fail(shadow, raised)
            return
        (label,) = self._label(shadow.name)
        self._metrics.add("shadow_score_distance", comparison.distance, shadow=label)
        self._metrics.add("shadow_duration_seconds", seconds, shadow=label)
        self._metrics.add("shadowed_duration_seconds", attempt.seconds, shadow=label)
        self._count(shadow, "agreed" if comparison.is_equal else "disagreed")

    def _count(self, shadow: Shadow, outcome: str) -> None:
        (label,) = self._label(shadow.name)
        self._metrics.add("shadow_requests_total", shadow=label, outcome=outcome)

    def _fail(self, shadow: Shadow, reason: object) -> None:
        """Count a failure, and log it at most once per `REPORT_EVERY_S` and shadow."""
        self._count(shadow, "failed")
        (label,), now = self._label(shadow.name), self._clock()
        with self._lock:
            must_report = now - self._reported_at.get(label, -REPORT_EVERY_S) >= REPORT_EVERY_S
            if must_report:
                self._reported_at[label] = now
        if must_report:
            self._log(f"shadow '{shadow.name}' failed: {reason}")


class _Mirror:
    def __init__(self, attempt: Attempt, response: Any, shadow: Shadow, started_at: float) -> None:
        self.attempt = attempt
        self.response = response
        self.shadow = shadow
        self.started_at = started_at
        self.deadline = started_at + shadow.deadline_ms / 1e3

    def late_error(self) -> DeadlineExceeded:
        """Return the error for a response after the deadline."""
        return DeadlineExceeded(f"no response in {self.shadow.deadline_ms} ms")

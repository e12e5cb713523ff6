"""Quality signals of a route: how sure its variants are, what they find, and how much."""

from collections.abc import Callable, Mapping
from typing import Any

from nereid.backends.routing.interfaces import MetricSink, RoutedRequest
from nereid.tasks.task_outputs import Signals, TaskOutputs

OTHER = "other"
# Attributes for the trace of a request.
About = Mapping[str, Any]
Observe = Callable[[RoutedRequest, Any, Mapping[str, str]], About]


def ignore(request: RoutedRequest, response: Any, labels: Mapping[str, str]) -> About:
    """Measure nothing."""
    return {}


class RouteQuality:
    """Measures the responses of a route.

    Args:
        metrics: receives `confidence`, `entropy`, `found` and `predicted_total`.
        task: of the route's variants.
    """

    def __init__(self, metrics: MetricSink, task: TaskOutputs) -> None:
        self._metrics, self._task = metrics, task
        self._classes: frozenset[int] | None = None

    def use(self, classes: frozenset[int] | None) -> None:
        """Count the best classes that are in `classes` by their index; None counts no classes."""
        self._classes = classes

    def observe(self, request: RoutedRequest, response: Any, labels: Mapping[str, str]) -> About:
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
            return signals.about
        except Exception:  # the client has its response
            return {}

    def _add(self, signals: Signals, labels: Mapping[str, str]) -> None:
        for name, values in signals.of_images.items():
            for value in values:
                self._metrics.add(name, value, **labels)
        if (classes := self._classes) is not None:
            for best in signals.best:
                name = str(best) if best in classes else OTHER
                self._metrics.add("predicted_total", **labels, **{"class": name})

"""Responses of a route to its clients: those of variants, the configured answer, and errors."""

from collections.abc import Callable
from typing import Any

from nereid.backends.routing import quality
from nereid.backends.routing.assignment import ANSWER
from nereid.backends.routing.attempts import AdmittedRequest, Attempt, Rungs
from nereid.backends.routing.interfaces import MetricSink
from nereid.backends.routing.shadows import CompletedRequest, Shadows
from nereid.base.serving_errors import ServingError, Unavailable, from_exception

# After an attempt that took longer, the client's connection is checked again.
LONG_ATTEMPT_S = 0.2


class Responses:
    """Sends responses and counts them; thread-safe.

    Args:
        metrics, observe: those of the router.
        shadows: get the requests with a response.
        in_flight: returns the number of requests in flight.
    """

    def __init__(
        self, metrics: MetricSink, observe: quality.Observe, shadows: Shadows, in_flight: Callable[[], int]
    ) -> None:
        self._metrics, self._observe = metrics, observe
        self._shadows, self._in_flight = shadows, in_flight

    def send(self, attempt: Attempt, response: Any) -> None:
        """Send the response of a variant, then mirror its request to the shadows."""
        admitted, labels = attempt.admitted, attempt.served.labels
        request, route, trace = admitted.request, admitted.table.route, admitted.trace
        if attempt.seconds > LONG_ATTEMPT_S and request.is_cancelled():
            self._metrics.add("cancelled_total")
        try:
            request.respond(response, attempt.variant.name, attempt.network_version, attempt.reason)
        except Exception as raised:  # a response that cannot be built must not leave its client waiting
            admitted.reject(from_exception(raised))
            return
        if trace.is_probe:
            trace.end()
            return
        if not attempt.is_chosen:
            self._count_fallback(attempt.rungs, labels["variant"], attempt.reason)
        trace.end(**self._observe(request, response, labels))
        if route.shadows:
            completed = CompletedRequest(
                request, route, attempt.variant, response, attempt.seconds, admitted.key, trace
            )
            self._shadows.mirror(completed, self._in_flight)

    def fail(self, admitted: AdmittedRequest, rungs: Rungs, error: ServingError) -> None:
        """Send the configured answer if the route has one and no variant can be reached, else the error."""
        answer = admitted.table.answer
        is_unreachable = isinstance(error, Unavailable) and not rungs.is_forced
        if not answer or not is_unreachable or admitted.trace.is_probe:
            admitted.reject(error)
            return
        try:
            admitted.request.answer(answer)
        except Exception as raised:
            admitted.reject(from_exception(raised))
            return
        self._count_fallback(rungs, ANSWER, ANSWER)
        self.count(ANSWER, "", "ok", ANSWER)
        admitted.trace.end()

    def count(self, variant: str, version: str, outcome: str, reason: str) -> None:
        """Count an attempt on a variant, or a request without one."""
        self._metrics.add("requests_total", variant=variant, version=version, outcome=outcome, reason=reason)

    def _count_fallback(self, rungs: Rungs, to: str, reason: str) -> None:
        self._metrics.add("fallbacks_total", **{"from": rungs.first_label, "to": to, "reason": reason})

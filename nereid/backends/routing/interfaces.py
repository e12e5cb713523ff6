"""Interfaces between the router and its host: requests, deadlines, traces, and the metrics that it writes."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from nereid.backends.routing.assignment import FORCED
from nereid.base.contract import DEADLINE_PARAMETER, PROBE_HEADER, SENT_PARAMETER, TRACE_PARAMETER
from nereid.base.errors import DeadlineExceeded, InvalidRequest, ServingError, is_fault
from nereid.base.tracing.context import TraceContext, continue_or_start_trace, new_trace, parse_traceparent
from nereid.base.tracing.records import Record, Tracer, error_field, keep_field, never_raises, shortened, span

# A model with this many attempts that are past their deadline and have not returned gets no more, because
# each occupies a thread, in the server as well.
MAX_LATE = 8
NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})


class RoutedRequest(Protocol):
    """One request; `timeout_s` is how long its client waits, 0 for no limit."""

    timeout_s: float

    def check(self) -> None:
        """Check what every variant would reject; raises InvalidRequest."""

    def parameters(self) -> Mapping[str, Any]:
        """Return the request's parameters; raises InvalidRequest."""

    def is_cancelled(self) -> bool:
        """Return whether the client has disconnected."""

    def is_large(self) -> bool:
        """Return whether an image is so large that its request may be slow; reads all images."""

    def forward(
        self, model: str, version: int, timeout_s: float, parameters: Mapping[str, Any] = NO_PARAMETERS
    ) -> Any:
        """Send the request to a model, with parameters, and return the response; raises ServingError."""

    def arrays(self, response: Any, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Return outputs of a response, each [N, …], by name."""

    def respond(self, response: Any, variant: str, version: str, reason: str) -> None:
        """Send the response to the client, with the variant, its version and the reason for it."""

    def answer(self, rows: Mapping[str, np.ndarray]) -> None:
        """Send the configured answer to the client: for each image, a row of each output."""

    def reject(self, error: ServingError) -> None:
        """Send an error to the client."""


class MetricSink(Protocol):
    """Receiver of the metrics named in `metrics.ROUTE_METRICS`."""

    def add(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Increment a counter, or observe a value in a histogram."""

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Set the value of a gauge."""


class BoundedLabels:
    """Label values of a metric: after `LIMIT` of them, all others become `other`.

    A route may change without limit, but a series lasts as long as its server.
    """

    LIMIT = 64

    def __init__(self) -> None:
        self._known: set[tuple[str, ...]] = set()

    def __call__(self, *names: str) -> tuple[str, ...]:
        """Return the labels for `names`, which belong together."""
        if names not in self._known and len(self._known) >= self.LIMIT:
            return ("other",) * len(names)
        self._known.add(names)
        return names


PROBE: Mapping[str, Any] = {PROBE_HEADER: "1"}


class OpenSpan:
    """A span that has not ended; `parameters` are for the request to the model that continues the trace."""

    def __init__(self, context: TraceContext, name: str, **attributes: Any) -> None:
        self.context, self.begin_ns = context, time.time_ns()
        self.name, self.attributes = name, attributes
        self.parameters = {TRACE_PARAMETER: str(context), SENT_PARAMETER: self.begin_ns}

    def record(self, kind: str, parent: str, error: object = None) -> Record:
        """Return the record of the span, which ends now."""
        ended = span(self.context, parent, self.name, self.begin_ns, time.time_ns())
        return {**ended, "kind": kind, "about": self.attributes, **error_field(error)}


class RequestTrace:
    """The trace of one request at a route; `is_probe` if the supervisor sent it, which is not traffic.

    Args:
        tracer: sends the records, None if tracing is off.
        route: name of the route.
        request_id: the caller's.
    """

    def __init__(self, tracer: Tracer | None, route: str, request_id: str) -> None:
        self._tracer, self._route, self._id = tracer, route, shortened(request_id)
        self._span: OpenSpan | None = None
        self._parent = ""
        self._attempts: list[Record] = []
        self._last: dict[str, str] = {}
        self.is_probe = self._has_ended = self._is_kept = False
        self._arrived_ns = time.time_ns() if tracer else 0

    @never_raises
    def begin(self, parameters: Mapping[str, str]) -> None:
        """Begin the span of the route, in the trace of the caller if the parameters have one."""
        self.is_probe = self.is_probe or PROBE_HEADER in parameters
        if self._tracer and not self.is_probe:
            context, self._parent = continue_or_start_trace(
                parse_traceparent(parameters.get(TRACE_PARAMETER, "")), self._tracer.sampling.share
            )
            self._span = OpenSpan(context, f"route {self._route}")
            self._span.begin_ns = self._arrived_ns

    @never_raises
    def attempt(self, variant: str, version: str, reason: str) -> OpenSpan | None:
        """Begin the span of an attempt."""
        if self._span is None:
            return None
        self._last = {"variant": variant, "version": version, "reason": reason}
        context = self._span.context.child()
        return OpenSpan(context, f"attempt {variant}", variant=variant, reason=reason)

    def parameters(self, attempt: OpenSpan | None) -> Mapping[str, Any]:
        """Return the parameters of the request of an attempt or a shadow."""
        return attempt.parameters if attempt else PROBE if self.is_probe else NO_PARAMETERS

    @never_raises
    def end_attempt(self, attempt: OpenSpan | None, error: ServingError | None) -> None:
        """End the span of an attempt; one that returns after the response has a record of its own."""
        if self._span is None or attempt is None or self._tracer is None:
            return
        record = attempt.record("attempt", self._span.context.span_id, error)
        if self._has_ended:
            self._tracer.send({**record, "sampled": self._is_kept or attempt.context.is_sampled})
        else:
            self._attempts.append(record)

    @never_raises
    def end(self, error: ServingError | None = None, **attributes: Any) -> None:
        """End the route's span, and send its record with its attempts' records.

        Traces of failures, of slow requests and of forced variants are kept.

        Args:
            attributes: further attributes.
        """
        if self._span is None:  # it was rejected before its parameters were read
            self.begin(NO_PARAMETERS)
        if self._span is None or self._tracer is None or self._has_ended:
            return
        self._has_ended = True
        outcome = error.outcome if error else "ok"
        self._span.attributes = {"route": self._route, **self._last, "outcome": outcome, **attributes}
        record = self._span.record("route", self._parent, error)
        is_slow = self._tracer.is_slow(record["begin"], record["end"])
        is_wanted = error is not None or self._last.get("reason") in FORCED
        reason = keep_field(is_slow or is_fault(error), is_wanted)
        self._is_kept = bool(reason)
        is_sampled = self._span.context.is_sampled
        self._tracer.send(
            {**record, **reason, "sampled": is_sampled, "id": self._id, "inner": self._attempts}
        )

    @never_raises
    def shadow(self, name: str) -> OpenSpan | None:
        """Begin the span of a shadow, in a trace of its own that is linked to this one."""
        if self._span is None:
            return None
        context = new_trace(self._span.context.is_sampled or self._is_kept)
        return OpenSpan(context, f"shadow {name}", shadow=name)

    @never_raises
    def end_shadow(self, shadow: OpenSpan | None, error: Exception | None) -> None:
        """End the span of a shadow."""
        if self._span is None or shadow is None or self._tracer is None:
            return
        link = [self._span.context.trace_id, self._span.context.span_id]
        record = shadow.record("shadow", "", error)
        self._tracer.send({**record, "link": link, "sampled": shadow.context.is_sampled})


def deadline_parameter(timeout_s: float) -> dict[str, int]:
    """Return the parameters of a request whose response is useless `timeout_s` seconds from now.

    A request's own `timeout` applies only in a queue whose `default_queue_policy` allows it. Such a policy
    costs throughput (docs/architecture.md): Triton then forms no batch until an instance waits for it, and
    overlooks some waiting instances. So the caller sends a parameter, which the receiving model compares with
    the clock.
    Source: core r24.10, RateLimiter::PayloadSlotAvailable.
    """
    return {DEADLINE_PARAMETER: time.monotonic_ns() + int(timeout_s * 1e9)}


def check_deadline(parameters: Mapping[str, Any]) -> None:
    """Check the deadline of a request.

    Raises:
        DeadlineExceeded: the deadline has passed.
        InvalidRequest: the deadline is not an integer.
    """
    if (deadline_ns := parameters.get(DEADLINE_PARAMETER)) is None:
        return
    if type(deadline_ns) is not int:
        raise InvalidRequest(f"parameter '{DEADLINE_PARAMETER}' must be an integer, got {deadline_ns!r}")
    if deadline_ns < time.monotonic_ns():
        raise DeadlineExceeded("expired while queued for an instance")

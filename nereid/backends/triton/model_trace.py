"""The spans of the requests of one batch at a model."""

import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from nereid.base.config.model_config import ModelConfig
from nereid.base.config.server_flags import backend_config_values, server_command_line
from nereid.base.contract import PROBE_HEADER, SENT_PARAMETER, TRACE_PARAMETER
from nereid.base.errors import ServingError, is_fault
from nereid.base.tracing.context import TraceContext, continue_or_start_trace, parse_traceparent
from nereid.base.tracing.records import (
    TRACING_BACKEND,
    Record,
    Tracer,
    child_span,
    error_field,
    keep_field,
    never_raises,
    shortened,
    span,
)


class Times(Protocol):
    """Times of an image's stages."""

    def spans(self) -> list[dict[str, Any]]:
        """Return the stages as spans."""


def open_tracer() -> Tracer | None:
    """Return the tracer of this server; None if tracing is off."""
    return Tracer.from_flags(backend_config_values(server_command_line(), TRACING_BACKEND))


class ModelTracer:
    """Traces the batches of one instance.

    Args:
        starts_traces: whether a request without a trace starts one; otherwise it is not traced.
        has_one_thread: whether the same thread begins and ends a batch, so that its waits can be measured.
        attributes: attributes of all spans.
    """

    def __init__(
        self, config: ModelConfig, starts_traces: bool = False, has_one_thread: bool = True, **attributes: Any
    ) -> None:
        self._tracer, self._starts_traces = open_tracer(), starts_traces
        self._name = config.name
        self._attributes = {
            "model": config.name,
            "model_version": config.version,
            "device": config.device_kind,
            **attributes,
        }
        self._waits = _CoreWaits() if has_one_thread else None

    def close(self) -> None:
        """Send the last records."""
        if self._tracer:
            self._tracer.close()

    @never_raises
    def begin(self, requests: Sequence[Any]) -> "BatchTrace | None":
        """Begin the spans of a batch; None if no request is traced."""
        if self._tracer is None:
            return None
        traced = [_Traced.of(request, self._tracer, self._starts_traces) for request in requests]
        if not any(traced):
            return None
        return BatchTrace(self._tracer, self._name, self._attributes, traced, self._waits)


class BatchTrace:
    """The spans of the requests of a batch, from its start to `end`."""

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        attributes: dict[str, Any],
        traced: "Sequence[_Traced | None]",
        waits: "_CoreWaits | None",
    ) -> None:
        self._tracer, self._name, self._attributes = tracer, name, attributes
        self._traced, self._waits = traced, waits
        self._waited_ns, self._begin_ns = waits.read_ns() if waits else 0, time.time_ns()
        self._images: Sequence[Sequence[Times]] = [()] * len(traced)
        self._network: list[Record] = []
        self._rows = 0

    @property
    def traceparents(self) -> list[str]:
        """The span of each request, for the models to which it sends requests; "" for one without a trace."""
        return [str(traced.context) if traced else "" for traced in self._traced]

    @never_raises
    def record_preparation(self, images: Sequence[Sequence[Times]]) -> None:
        """Store the times of each request's images."""
        self._images = images

    @never_raises
    def record_run(self, begin_ns: int, rows: int, end_ns: int = 0) -> None:
        """Store a run of the network, which ends now or at `end_ns`."""
        self._network.append(child_span("network", begin_ns, end_ns or time.time_ns()))
        self._rows = rows

    @never_raises
    def end(self, outcomes: Sequence[Any]) -> None:
        """Send the record of each request.

        Args:
            outcomes: one per request; errors are `ServingError`.
        """
        end_ns = time.time_ns()
        attributes = {**self._attributes, "batch_size": self._rows or len(self._traced)}
        if self._waits:
            attributes["core_wait_ms"] = round((self._waits.read_ns() - self._waited_ns) / 1e6, 3)
        for traced, images, outcome in zip(self._traced, self._images, outcomes, strict=True):
            if traced is None:
                continue
            error = outcome if isinstance(outcome, ServingError) else None
            ended = span(traced.context, traced.parent, self._name, self._begin_ns, end_ns)
            queue_ms = round((self._begin_ns - traced.sent_ns) / 1e6, 3) if traced.sent_ns else None
            is_slow = not traced.parent and self._tracer.is_slow(self._begin_ns, end_ns)
            self._tracer.send(
                {
                    **ended,
                    "kind": "model",
                    "id": traced.request_id,
                    "about": {**attributes, "queue_ms": queue_ms},
                    "inner": [*(stage for times in images for stage in times.spans()), *self._network],
                    **keep_field(is_slow or is_fault(error), error is not None),
                    "sampled": traced.context.is_sampled,
                    **error_field(error),
                }
            )


class _Traced(NamedTuple):
    """A request that is traced: its span, its parent's id, and when it was sent, in ns, 0 if unknown."""

    context: TraceContext
    parent: str
    request_id: str
    sent_ns: int

    @classmethod
    def of(cls, request: Any, tracer: Tracer, starts_traces: bool) -> "_Traced | None":
        try:
            text = request.parameters() or "{}"
            parameters = {name.lower(): value for name, value in json.loads(text).items()}
        except ValueError:  # headers that are not UTF-8: the request is rejected later
            return None
        if PROBE_HEADER in parameters or not (starts_traces or TRACE_PARAMETER in parameters):
            return None
        caller = parse_traceparent(str(parameters.get(TRACE_PARAMETER, "")))
        context, parent = continue_or_start_trace(caller, tracer.sampling.share)
        sent_ns = parameters.get(SENT_PARAMETER, 0)
        request_id = shortened(str(request.request_id()))
        return cls(context, parent, request_id, sent_ns if type(sent_ns) is int else 0)


class _CoreWaits:
    """How long the thread of an instance was ready to run, but had no core.

    Source: Linux, Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        self._thread = 0

    def read_ns(self) -> int:
        """Return the nanoseconds since the start of the thread; 0 if the kernel does not count them."""
        if self._thread != threading.get_native_id():
            if self._file is not None:
                os.close(self._file)
            self._thread = threading.get_native_id()
            self._file = _open(f"/proc/self/task/{self._thread}/schedstat")
        if self._file is None:
            return 0
        return int(os.pread(self._file, 128, 0).split()[1])


def _open(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None

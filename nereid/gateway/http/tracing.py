"""Request ids, and the spans of a request at the gateway. Valid ids are accepted, missing ones created."""

import random
import time
from typing import Any

from nereid.tracing.context import TraceContext, begin, parse
from nereid.tracing.records import Record, Tracer, failed, harmless, inner, kept, span

MAX_ID_LENGTH = 128


def is_word(value: str, max_length: int = MAX_ID_LENGTH) -> bool:
    """Return whether a value is printable ASCII and not too long."""
    return 0 < len(value) <= max_length and value.isascii() and value.isprintable()


def new_request_id() -> str:
    """Return 32 hexadecimal digits; unique, not secret."""
    return f"{random.getrandbits(128):032x}"


class RequestSpans:
    """The spans of one request: its own, and those of its stages.

    Args:
        tracer: sends the record, None if tracing is off.
        traceparent: the caller's, "" or invalid for none.

    Attributes:
        context: the span of the request.
        is_forwarded: whether the server gets the trace context: with tracing, or if a caller began the trace.
    """

    def __init__(self, tracer: Tracer | None, traceparent: str) -> None:
        self._tracer, self._inner = tracer, list[Record]()
        caller = parse(traceparent)
        self.context, self._parent = begin(caller, tracer.sampling.share if tracer else 0.0)
        self.is_forwarded = tracer is not None or caller is not None
        self._begin_ns = time.time_ns() if tracer else 0

    @harmless
    def add(self, stage: str, seconds: float, context: TraceContext | None = None, of: str = "") -> None:
        """Add a stage that ends now.

        Args:
            stage: `receive`, `admission` or `inference`.
            seconds: its duration.
            context: span of an inference, which the server continues.
            of: id of the inference that an admission is for.
        """
        if self._tracer is None:
            return
        end_ns = time.time_ns()
        record = inner(stage, end_ns - int(seconds * 1e9), end_ns)
        self._inner.append({**record, **({"span": context.span_id} if context else {}), "of": of})

    @harmless
    def end(self, request_id: str, outcome: str, is_fault: bool, **about: Any) -> None:
        """Send the record of the request, which ends now.

        Args:
            request_id: of the request.
            outcome: `ok` or the code of the failure.
            is_fault: whether the service is at fault; such traces are kept.
            about: attributes.
        """
        if self._tracer is None:
            return
        is_failed = outcome != "ok"
        ended = span(
            self.context, self._parent, f"gateway {about['endpoint']}", self._begin_ns, time.time_ns()
        )
        is_slow = self._tracer.is_slow(ended["begin"], ended["end"])
        self._tracer.send(
            {
                **ended,
                "kind": "gateway",
                "id": request_id,
                "about": {**about, "outcome": outcome},
                "inner": self._inner,
                **kept(is_fault or is_slow, is_failed),
                "sampled": self.context.is_sampled,
                **failed(outcome if is_failed else None),
            }
        )

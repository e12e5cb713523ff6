"""W3C trace context: a span's position in its trace.

Source: W3C Trace Context, level 1: https://www.w3.org/TR/trace-context/
"""

import random
import re
import time
from dataclasses import dataclass

from nereid.base.contract import SENT_PARAMETER, TRACE_PARAMETER

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of a trace.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits.
        is_sampled: whether the trace was sampled when it began.
    """

    trace_id: str
    span_id: str
    is_sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"

    def child(self) -> "TraceContext":
        """Return a new span in the same trace."""
        return TraceContext(self.trace_id, new_span_id(), self.is_sampled)


def parse_traceparent(traceparent: str) -> TraceContext | None:
    """Return the context in a `traceparent`, or None if the value is invalid."""
    if not (match := _TRACEPARENT.fullmatch(traceparent)):
        return None
    version, trace, span, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not trace.strip("0") or not span.strip("0"):
        return None
    return TraceContext(trace, span, bool(int(flags, 16) & 1))


def trace_parameters(traceparent: str) -> dict[str, str | int]:
    """Return the parameters with which a request sent to a model now continues the trace."""
    return {TRACE_PARAMETER: traceparent, SENT_PARAMETER: time.time_ns()}


def continue_or_start_trace(caller: TraceContext | None, share: float) -> tuple[TraceContext, str]:
    """Return a span in the caller's trace or in a new one, and its parent's id ("" if it has no parent).

    A fraction `share` of new traces is sampled; the caller decides for its own.
    """
    if caller:
        return caller.child(), caller.span_id
    return new_trace(random.random() < share), ""


def new_trace(is_sampled: bool) -> TraceContext:
    """Return the first span of a new trace."""
    return TraceContext(f"{random.getrandbits(128) or 1:032x}", new_span_id(), is_sampled)


def new_span_id() -> str:
    """Return 16 hexadecimal digits, not all zero."""
    return f"{random.getrandbits(64) or 1:016x}"

"""Export of kept traces over OTLP; requires the extra `traces`."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from nereid.base.tracing.context import new_span_id
from nereid.base.tracing.records import Record

PATH = "/v1/traces"
EXPORT_EVERY_MS = 1000
CLOSE_TIMEOUT_S = 2.0
KINDS = {
    "gateway": SpanKind.SERVER,
    "route": SpanKind.SERVER,
    "attempt": SpanKind.CLIENT,
    "inference": SpanKind.CLIENT,
    "shadow": SpanKind.CLIENT,
    "model": SpanKind.SERVER,
}


class Exporter:
    """Sends spans in batches from its own thread.

    Args:
        endpoint: URL of an OTLP/HTTP receiver, such as `http://localhost:4318`.
    """

    def __init__(self, endpoint: str) -> None:
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint.rstrip("/") + PATH), schedule_delay_millis=EXPORT_EVERY_MS
        )
        # OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME.
        resource = OTELResourceDetector().detect()
        first = resource.attributes.get("service.name", "nereid")
        self._resources = {
            name: resource.merge(Resource({"service.name": f"{first}-{name}"}))
            for name in ("gateway", "route", "model")
        }

    def export(self, records: Sequence[Record]) -> None:
        """Queue the records' spans; they are dropped if the queue is full."""
        for record in records:
            for span in self._spans(record):
                self._processor.on_end(span)

    def close(self) -> None:
        """Send the queued spans, without waiting long for a slow receiver."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)

    def _spans(self, record: Record) -> Iterator[ReadableSpan]:
        resource = self._resources.get(record["kind"], self._resources["route"])
        yield _span(record, record["trace"], record["parent"], record["kind"], resource)
        for span in record.get("inner", ()):
            kind = span.get("kind", span["name"])
            yield _span({"span": new_span_id(), **span}, record["trace"], record["span"], kind, resource)


def _span(span: Record, trace: str, parent: str, kind: str, resource: Resource) -> ReadableSpan:
    error = span.get("error")
    link = span.get("link")
    attributes: dict[str, Any] = {
        name: value for name, value in span.get("about", {}).items() if value is not None
    }
    return ReadableSpan(
        span["name"],
        _context(trace, span["span"]),
        _context(trace, parent) if parent else None,
        resource,
        {f"nereid.{name}": value for name, value in attributes.items()},
        links=[Link(_context(*link))] if link else [],
        kind=KINDS.get(kind, SpanKind.INTERNAL),
        status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
        start_time=span["begin"],
        end_time=span["end"],
    )


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), True, TraceFlags(TraceFlags.SAMPLED))

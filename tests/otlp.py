"""A receiver of OTLP over HTTP for tests: it decodes the real messages, and builds the trees of traces."""

import gzip
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests import http_receiver
from tests.routes import wait_until


@dataclass(frozen=True, slots=True)
class Span:
    """A received span; ids are hexadecimal, `parent` is "" for none."""

    trace: str
    span: str
    parent: str
    name: str
    service: str
    begin_ns: int
    end_ns: int
    is_error: bool
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Receiver:
    endpoint: str
    spans: list[Span] = field(default_factory=list)

    def of(self, trace: str) -> list[Span]:
        return [span for span in self.spans if span.trace == trace]

    def wait_for(self, trace: str, *names: str) -> list[Span]:
        wait_until(lambda: {*names} <= {span.name for span in self.of(trace)}, f"spans {names}")
        return self.of(trace)


def root_of(spans: Collection[Span], caller: str = "") -> Span:
    """Return the root of a trace; fails unless its spans are one tree below the caller's span."""
    ids = {span.span for span in spans}
    assert len(ids) == len(spans), "a span came twice"
    roots = [span for span in spans if span.parent == caller]
    lost = [span.name for span in spans if span.parent not in ids and span.parent != caller]
    assert not lost, f"without parent: {lost}"
    assert len(roots) == 1, f"roots: {[span.name for span in roots]}"
    children = {parent: [span for span in spans if span.parent == parent] for parent in ids}
    reached, todo = set[str](), [roots[0]]
    while todo:
        reached.add((span := todo.pop()).span)
        todo += children[span.span]
    assert reached == ids, "the spans are not connected"
    return roots[0]


@contextmanager
def receiving() -> Iterator[Receiver]:
    def answer(path: str, headers: Message, body: bytes) -> tuple[int, bytes]:
        if headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        receiver.spans += decoded(ExportTraceServiceRequest.FromString(body))
        return 200, b""

    with http_receiver.receiving(answer) as address:
        receiver = Receiver(f"http://{address}")
        yield receiver


def decoded(message: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in message.resource_spans:
        service = _values(resource.resource.attributes).get("service.name", "")
        for scope in resource.scope_spans:
            for span in scope.spans:
                links = tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links)
                ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                times = span.start_time_unix_nano, span.end_time_unix_nano
                is_error = span.status.code == Status.STATUS_CODE_ERROR
                yield Span(*ids, span.name, service, *times, is_error, _values(span.attributes), links)


def _values(attributes: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}

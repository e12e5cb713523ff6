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
    about: dict[str, Any]
    links: tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Receiver:
    endpoint: str
    spans: list[Span] = field(default_factory=list)

    def of(self, trace: str) -> list[Span]:
        return [each for each in self.spans if each.trace == trace]

    def wait_for(self, trace: str, *names: str) -> list[Span]:
        wait_until(lambda: {*names} <= {each.name for each in self.of(trace)}, f"spans {names}")
        return self.of(trace)


def root_of(spans: Collection[Span], caller: str = "") -> Span:
    """Return the root of a trace; fails unless its spans are one tree below the caller's span."""
    ids = {each.span for each in spans}
    assert len(ids) == len(spans), "a span came twice"
    roots = [each for each in spans if each.parent == caller]
    lost = [each.name for each in spans if each.parent not in ids and each.parent != caller]
    assert not lost, f"without parent: {lost}"
    assert len(roots) == 1, f"roots: {[each.name for each in roots]}"
    children = {parent: [each for each in spans if each.parent == parent] for parent in ids}
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
            for each in scope.spans:
                links = tuple((link.trace_id.hex(), link.span_id.hex()) for link in each.links)
                ids = each.trace_id.hex(), each.span_id.hex(), each.parent_span_id.hex()
                times = each.start_time_unix_nano, each.end_time_unix_nano
                is_error = each.status.code == Status.STATUS_CODE_ERROR
                yield Span(*ids, each.name, service, *times, is_error, _values(each.attributes), links)


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}

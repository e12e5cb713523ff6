"""A request with its context, and its response; kept lightweight because every request pays for it."""

import random
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from nereid.base.contract import OPTION_HEADERS, ROUTE_HEADER_PREFIX, VARIANT_HEADER, VERSION_HEADER
from nereid.base.tracing.context import TraceContext, continue_or_start_trace, parse_traceparent
from nereid.base.tracing.records import (
    Record,
    Tracer,
    child_span,
    error_field,
    keep_field,
    never_raises,
    span,
)
from nereid.gateway.failures import ErrorAnswer, Failure, invalid_request
from nereid.gateway.keys import Key

if TYPE_CHECKING:
    from nereid.gateway.models import OfferedModel

JSON = b"application/json"
ROUTE_PREFIX = ROUTE_HEADER_PREFIX.encode()
TIMEOUT_HEADER = b"x-request-timeout-ms"
# If one of these were repeated, a proxy could use the first value and the gateway the last.
SINGLE_VALUE_HEADERS = frozenset(
    {
        b"host",
        b"origin",
        b"content-type",
        b"content-encoding",
        b"authorization",
        b"x-api-key",
        TIMEOUT_HEADER,
        VARIANT_HEADER.encode(),
        VERSION_HEADER.encode(),
    }
)
# Callers' headers that are passed on to Triton, by the equivalent parameter names.
HEADER_BY_PARAMETER = {name: header.encode() for name, header in OPTION_HEADERS.items()}
# gRPC rejects other names, and decodes the values of `-bin` headers as base64.
_RULE_HEADER = re.compile(rb"x-route-[a-z0-9-]{1,56}(?<!-bin)")
MAX_FORWARDED_HEADERS = 32
OPTION_HEADER_NAMES = frozenset(HEADER_BY_PARAMETER.values())
encode = msgspec.json.Encoder().encode
MAX_ID_LENGTH = 128


def is_word(value: str) -> bool:
    """Return whether a value is non-empty printable ASCII of acceptable length."""
    return 0 < len(value) <= MAX_ID_LENGTH and value.isascii() and value.isprintable()


class GatewayRequest:
    """A request from its arrival to its response.

    Attributes:
        headers: by lower-case name; the last value where repeated headers are allowed.
        arrived_at: arrival time of the head, from `time.perf_counter`.
        limit_s: the caller's timeout in seconds, measured from the arrival of the head.
        offered_model: the model that the request concerns, if any.
        endpoint, variant, outcome: labels for metrics and the log; "" while unknown.
        model_name: the model's name; over the v2 protocol, "" until it has answered.
        is_inference: whether the request is for images, and is therefore traced.
        is_task_inference: whether it is for a task's images.
        images: number of images with a known outcome.
    """

    def __init__(self, scope: Scope, receive: Receive, tracer: Tracer | None = None) -> None:
        self.arrived_at = time.perf_counter()
        self.scope, self.receive = scope, receive
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        sent_id = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.request_id = sent_id if sent_id and is_word(sent_id) else f"{random.getrandbits(128):032x}"
        self.spans = RequestSpans(tracer, self.headers.get(b"traceparent", b"").decode("latin-1"))
        self.endpoint = self.variant = self.outcome = self.model_name = ""
        self.offered_model: OfferedModel | None = None
        self.key: Key | None = None
        self.is_inference = self.is_task_inference = False
        self.limit_s = 0.0
        self.status = self.images = self.body_bytes = 0
        self.stages_s: dict[str, float] = {}

    @property
    def model(self) -> "OfferedModel":
        """The model that the request concerns; only for model operations."""
        assert self.offered_model
        return self.offered_model

    def end_stage(self, stage: str) -> float:
        """Record and return the seconds from the request's arrival to the end of a stage, which is now."""
        self.stages_s[stage] = now_s = time.perf_counter() - self.arrived_at
        if self.spans.is_traced:
            self.spans.add(stage, now_s)
        return now_s

    def reject_repeats(self) -> None:
        """Reject repeated headers that must be unique.

        Raises:
            Failure: a header is repeated.
        """
        pairs = self.scope["headers"]
        if len(pairs) == len(self.headers):
            return
        for name, count in Counter(name for name, _ in pairs).items():
            if count > 1 and (name in SINGLE_VALUE_HEADERS or name.startswith(ROUTE_PREFIX)):
                raise invalid_request(
                    f"header {name.decode('latin-1')[:64]!r} is repeated: expected 1 value, got {count}"
                )

    @property
    def key_id(self) -> str:
        """The id of the key; empty without a key."""
        return self.key.id if self.key else ""

    def elapsed_s(self) -> float:
        """Return the seconds since the request arrived."""
        return time.perf_counter() - self.arrived_at

    def header(self, name: bytes) -> str:
        """Return a header's value, or ""."""
        return self.headers.get(name, b"").decode("latin-1")

    def query(self, known: Collection[str]) -> dict[str, str]:
        """Return the query's parameters.

        Raises:
            Failure: a parameter is unknown or repeated.
        """
        text = self.scope["query_string"]
        if not text:
            return {}
        try:
            pairs = parse_qsl(
                text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=64
            )
        except ValueError:
            raise invalid_request("the query is not a list of NAME=VALUE") from None
        parameters = dict(pairs)
        if unknown := sorted({*parameters} - {*known}):
            names = ", ".join(known) or "none"
            raise invalid_request(f"unknown query parameter {unknown[0]!r}; known: {names}")
        if len(parameters) < len(pairs):
            raise invalid_request("a query parameter is repeated")
        return parameters

    def start_timeout(self, default_s: float, max_s: float) -> float:
        """Read the caller's timeout, which starts when the request arrives, and return the time left.

        Raises:
            Failure: the header is invalid, or no time is left.
        """
        self.limit_s = default_s
        if TIMEOUT_HEADER in self.headers:
            text = self.header(TIMEOUT_HEADER)
            self.limit_s = whole_number("X-Request-Timeout-Ms", text, int(max_s * 1000)) / 1000
        return self.remaining_s()

    def remaining_s(self) -> float:
        """Return the time left, in seconds.

        Raises:
            Failure: `deadline_exceeded`, no time is left.
        """
        if (remaining_s := self.arrived_at + self.limit_s - time.perf_counter()) > 0:
            return remaining_s
        raise self.deadline_failure()

    def deadline_failure(self) -> Failure:
        """Return the error response for a request that got no response in time."""
        return Failure("deadline_exceeded", f"no response within {self.limit_s:.3g} s")

    def forwarded(self, parameters: Mapping[str, str] = {}) -> list[tuple[bytes, bytes]]:
        """Return the headers that a route reads, including those given as parameters.

        Raises:
            Failure: there are too many, a value is not printable ASCII, or parameter and header disagree.
        """
        headers = []
        for name, value in self.headers.items():
            if name.startswith(ROUTE_PREFIX) or (name in OPTION_HEADER_NAMES and value):
                headers.append((name, value))
        for option, text in parameters.items():
            if text and option in HEADER_BY_PARAMETER:
                name = HEADER_BY_PARAMETER[option]
                if (in_head := self.header(name)) and in_head != text:
                    raise invalid_request(f"{option} is {text!r}, but {name.decode()} is {in_head!r}")
                if not is_word(text):
                    raise invalid_request(f"{option} must be printable ASCII of at most 128 characters")
                if not in_head:
                    headers.append((name, text.encode()))
        if len(headers) > MAX_FORWARDED_HEADERS:
            raise invalid_request(
                f"expected at most {MAX_FORWARDED_HEADERS} headers for routes, got {len(headers)}"
            )
        for name, value in headers:
            is_known = name in OPTION_HEADER_NAMES or _RULE_HEADER.fullmatch(name)
            if not (is_known and is_word(value.decode("latin-1"))):
                raise invalid_request(
                    f"header {name[:64].decode('latin-1')!r}: expected a name such as x-route-group, and "
                    "printable ASCII of at most 128 characters"
                )
        return headers


def whole_number(name: str, text: str, max_value: int) -> int:
    """Return the value of a parameter or header.

    Raises:
        Failure: the text is not a whole number from 1 to `max_value`.
    """
    if text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= max_value:
        return int(text)
    raise invalid_request(f"{name} must be a whole number from 1 to {max_value}, got {text[:64]!r}")


class RequestSpans:
    """The span of one request and the spans of its stages.

    Args:
        tracer: sends the record; None if tracing is off.
        traceparent: the caller's; "" or an invalid value means none.

    Attributes:
        context: the span of the request.
        is_traced: whether tracing is on.
        is_forwarded: whether the server gets the trace context: with tracing, or if a caller began the trace.
    """

    def __init__(self, tracer: Tracer | None, traceparent: str) -> None:
        self._tracer, self._children = tracer, list[Record]()
        self.is_traced = tracer is not None
        caller = parse_traceparent(traceparent) if traceparent else None
        self.context, self._parent = continue_or_start_trace(caller, tracer.sampling.share if tracer else 0.0)
        self.is_forwarded = tracer is not None or caller is not None
        self._begin_ns = time.time_ns() if tracer else 0

    @never_raises
    def add(self, stage: str, seconds: float, context: TraceContext | None = None, of: str = "") -> None:
        """Add a stage that ends now; only if `is_traced`.

        Args:
            stage: `receive`, `admission` or `inference`.
            context: span of an inference, which the server continues.
            of: id of the inference that an admission belongs to.
        """
        end_ns = time.time_ns()
        record = child_span(stage, end_ns - int(seconds * 1e9), end_ns)
        self._children.append({**record, **({"span": context.span_id} if context else {}), "of": of})

    @never_raises
    def end(self, request_id: str, outcome: str, is_fault: bool, **attributes: Any) -> None:
        """Send the record of the request, which ends now.

        Args:
            outcome: `ok` or the failure's code.
            is_fault: whether the service is at fault; such traces are kept.
            attributes: `endpoint`, and other attributes of the span.
        """
        if self._tracer is None:
            return
        is_failed = outcome != "ok"
        ended = span(
            self.context, self._parent, f"gateway {attributes['endpoint']}", self._begin_ns, time.time_ns()
        )
        is_slow = self._tracer.is_slow(ended["begin"], ended["end"])
        self._tracer.send(
            {
                **ended,
                "kind": "gateway",
                "id": request_id,
                "about": {**attributes, "outcome": outcome},
                "inner": self._children,
                **keep_field(is_fault or is_slow, is_failed),
                "sampled": self.context.is_sampled,
                **error_field(outcome if is_failed else None),
            }
        )


class GatewayResponse:
    """A complete response as an ASGI application: status, headers and body."""

    def __init__(
        self,
        body: bytes,
        content_type: bytes = JSON,
        status: int = 200,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        self.status, self.body = status, body
        length = str(len(body)).encode()
        self.headers = [(b"content-type", content_type), (b"content-length", length), *(headers or ())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send status, headers and body."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


def json_response(answer: Any, status: int = 200) -> GatewayResponse:
    """Return a value as JSON that must not be cached."""
    return GatewayResponse(encode(answer), JSON, status, [(b"cache-control", b"no-store")])


def failure_response(failure: Failure, request: GatewayRequest) -> GatewayResponse:
    """Return an error as JSON, in the format of the request's protocol."""
    is_v2 = request.scope["path"].startswith("/v2")
    answer = encode(
        {"error": failure.v2_message} if is_v2 else ErrorAnswer(failure.reason, request.request_id)
    )
    return GatewayResponse(answer, JSON, failure.status, [(b"cache-control", b"no-store"), *failure.headers])

"""One request with its context, and its response; kept cheap, because every request pays for it."""

import time
from collections import Counter
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from nereid.contract import ROUTE_HEADER_PREFIX, VARIANT_HEADER, VERSION_HEADER
from nereid.gateway.admission.keys import Key
from nereid.gateway.failures import ErrorAnswer, Failure, invalid_request
from nereid.gateway.http.tracing import RequestSpans, is_word, new_request_id
from nereid.gateway.models import OfferedModel
from nereid.tracing.records import Tracer

JSON = b"application/json"
ROUTE_PREFIX = ROUTE_HEADER_PREFIX.encode()
TIMEOUT_HEADER = b"x-request-timeout-ms"
# A proxy could use the first of two values, and the gateway the last.
SINGLE = frozenset(
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
encode = msgspec.json.Encoder().encode


class GatewayRequest:
    """A request from its arrival to its response.

    Attributes:
        headers: by lower-case name; the last value where repeated headers are allowed.
        spans: spans of the request.
        began_s: arrival of the head, from `time.perf_counter`.
        offered: the model that the request is about, if any.
        endpoint, variant, outcome: labels for metrics and the log; "" while unknown.
        model_name: a model that has answered by the v2 protocol.
        is_inference: whether the request is for images, and so has a trace.
        body_bytes: received bytes of the body.
        images: number of images with a known outcome.
        stages_s: durations of the stages.
    """

    def __init__(self, scope: Scope, receive: Receive, tracer: Tracer | None = None) -> None:
        self.began_s = time.perf_counter()
        self.scope, self.receive = scope, receive
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        given = self.headers.get(b"x-request-id", b"").decode("latin-1")
        self.request_id = given if is_word(given) else new_request_id()
        self.spans = RequestSpans(tracer, self.headers.get(b"traceparent", b"").decode("latin-1"))
        self.endpoint = self.variant = self.outcome = self.model_name = ""
        self.offered: OfferedModel | None = None
        self.key: Key | None = None
        self.is_inference = False
        self.status = self.images = self.body_bytes = 0
        self.stages_s: dict[str, float] = {}

    @property
    def model(self) -> OfferedModel:
        """The model that the request is about; only for operations of a model."""
        assert self.offered
        return self.offered

    @property
    def model_label(self) -> str:
        """The model as a label of metrics; "" for requests about no model."""
        return self.offered.name if self.offered else self.model_name

    def end_stage(self, stage: str, began_s: float = 0.0) -> float:
        """Record the duration of a stage that ends now, and return the seconds since the request arrived."""
        now_s = self.elapsed_s()
        self.stages_s[stage] = now_s - began_s
        self.spans.add(stage, now_s - began_s)
        return now_s

    def reject_repeats(self) -> None:
        """Reject repeated headers that must be unique.

        Raises:
            Failure: a header is repeated.
        """
        given = self.scope["headers"]
        if len(given) == len(self.headers):
            return
        for name, count in Counter(name for name, _ in given).items():
            if count > 1 and (name in SINGLE or name.startswith(ROUTE_PREFIX)):
                raise invalid_request(
                    f"header {name.decode('latin-1')[:64]!r} is repeated: expected 1 value, got {count}"
                )

    @property
    def owner(self) -> str:
        """The id of the key; empty without a key."""
        return self.key.id if self.key else ""

    def elapsed_s(self) -> float:
        """Return the seconds since the request arrived."""
        return time.perf_counter() - self.began_s

    def header(self, name: bytes) -> str:
        """Return the value of a header, or ""."""
        return self.headers.get(name, b"").decode("latin-1")

    def query(self, known: tuple[str, ...]) -> dict[str, str]:
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
        given = dict(pairs)
        if unknown := sorted({*given} - {*known}):
            names = ", ".join(known) or "none"
            raise invalid_request(f"unknown query parameter {unknown[0]!r}; known: {names}")
        if len(given) < len(pairs):
            raise invalid_request("a query parameter is repeated")
        return given

    def timeout_s(self, default_s: float, max_s: float) -> float:
        """Return the timeout of the caller, from the arrival of the request.

        Raises:
            Failure: the header is invalid.
        """
        if TIMEOUT_HEADER not in self.headers:
            return default_s
        return whole_number("X-Request-Timeout-Ms", self.header(TIMEOUT_HEADER), int(max_s * 1000)) / 1000


def whole_number(name: str, text: str, max_value: int) -> int:
    """Return the value of a parameter or header.

    Raises:
        Failure: the text is not a whole number from 1 to `max_value`.
    """
    if text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= max_value:
        return int(text)
    raise invalid_request(f"{name} must be a whole number from 1 to {max_value}, got {text[:64]!r}")


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
    """Return an error as JSON, in the form of the protocol of the request."""
    is_v2 = request.scope["path"].startswith("/v2")
    answer = encode(
        {"error": failure.v2_message} if is_v2 else ErrorAnswer(failure.reason, request.request_id)
    )
    return GatewayResponse(answer, JSON, failure.status, [(b"cache-control", b"no-store"), *failure.headers])

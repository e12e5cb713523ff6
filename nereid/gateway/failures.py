"""Error responses of the gateway: codes, statuses, messages and headers."""

import re
from enum import IntEnum
from math import ceil
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from nereid.base import contract

if TYPE_CHECKING:
    from nereid.base.http_connection import HttpResponse

Code = Literal[
    "invalid_image",
    "invalid_request",
    "unauthenticated",
    "forbidden",
    "not_found",
    "no_route_control",
    "unknown_request",
    "method_not_allowed",
    "body_timeout",
    "conflict",
    "too_large",
    "unsupported_media_type",
    "unencodable_text",
    "rate_limited",
    "overloaded",
    "inference_failed",
    "unavailable",
    "unreachable",
    "deadline_exceeded",
]


class GrpcStatus(IntEnum):
    """gRPC statuses. Source: grpc/doc/statuscodes.md."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class ErrorKind(NamedTuple):
    """What a code means, the same in every protocol.

    Attributes:
        fault: who caused it; only a server fault counts as a failure of the service.
        is_retryable: whether the gateway may resend an image because the model has not processed it.
        prefix: start of the message in the v2 protocol, which has no field for a code.
    """

    status: int
    grpc: GrpcStatus
    fault: Literal["caller", "load", "server"] = "caller"
    is_retryable: bool = False
    prefix: str = ""


ERROR_KINDS: dict[Code, ErrorKind] = {
    "invalid_image": ErrorKind(400, GrpcStatus.INVALID_ARGUMENT, prefix=contract.INVALID_IMAGE_PREFIX),
    "invalid_request": ErrorKind(400, GrpcStatus.INVALID_ARGUMENT, prefix=contract.INVALID_REQUEST_PREFIX),
    "unauthenticated": ErrorKind(401, GrpcStatus.UNAUTHENTICATED),
    "forbidden": ErrorKind(403, GrpcStatus.PERMISSION_DENIED),
    "not_found": ErrorKind(404, GrpcStatus.NOT_FOUND),
    "no_route_control": ErrorKind(404, GrpcStatus.NOT_FOUND),
    "unknown_request": ErrorKind(404, GrpcStatus.NOT_FOUND),
    "method_not_allowed": ErrorKind(405, GrpcStatus.UNIMPLEMENTED),
    "body_timeout": ErrorKind(408, GrpcStatus.DEADLINE_EXCEEDED),
    "conflict": ErrorKind(409, GrpcStatus.ABORTED),
    "too_large": ErrorKind(413, GrpcStatus.INVALID_ARGUMENT),
    "unsupported_media_type": ErrorKind(415, GrpcStatus.UNIMPLEMENTED),
    "unencodable_text": ErrorKind(422, GrpcStatus.INVALID_ARGUMENT),
    "rate_limited": ErrorKind(429, GrpcStatus.RESOURCE_EXHAUSTED),
    "overloaded": ErrorKind(429, GrpcStatus.RESOURCE_EXHAUSTED, "load", prefix=contract.OVERLOADED_PREFIX),
    "inference_failed": ErrorKind(
        500, GrpcStatus.INTERNAL, "server", prefix=contract.INFERENCE_FAILED_PREFIX
    ),
    "unavailable": ErrorKind(
        503, GrpcStatus.UNAVAILABLE, "server", is_retryable=True, prefix=contract.UNAVAILABLE_PREFIX
    ),
    "unreachable": ErrorKind(
        503, GrpcStatus.UNAVAILABLE, "server", is_retryable=True, prefix=contract.UNAVAILABLE_PREFIX
    ),
    "deadline_exceeded": ErrorKind(
        504, GrpcStatus.DEADLINE_EXCEEDED, "load", prefix=contract.DEADLINE_EXCEEDED_PREFIX
    ),
}
STATUS_BY_CODE: dict[Code, int] = {code: kind.status for code, kind in ERROR_KINDS.items()}
# Service faults; other outcomes are caused by callers or load.
SERVER_FAULTS = frozenset(code for code, kind in ERROR_KINDS.items() if kind.fault == "server")
# Outcomes caused by the server or its load rather than by the image.
SERVER_OUTCOMES = frozenset(code for code, kind in ERROR_KINDS.items() if kind.fault != "caller")
# The outcome of a request whose client disconnected.
CLIENT_CLOSED = "client_closed"
GATEWAY_FAILED = "the gateway failed; its log has the request id"
UNAVAILABLE_RETRY_S = 1.0
# Shared memory region names help attackers (CVE-2025-23320), and paths reveal details of the machine.
_INTERNAL = re.compile(r"shm|shared memory|nereid-[0-9a-f]{8}|(?:^|[\s'\"(=])/\w[\w.-]*/")
_HIDDEN_REASON = "the logs of server and gateway have the reason"
_CODE_BY_STATUS: dict[int, Code] = {400: "invalid_request", 404: "not_found", 429: "overloaded"}
_CODES: dict[str, Code] = {code: code for code in ERROR_KINDS}
_TEXTS: tuple[tuple[str, Code], ...] = (
    *((text, _CODES.get(code, "inference_failed")) for text, code in contract.CODES_BY_TEXT.items()),
    # For example a number that is too large.
    ("failed to parse the request JSON buffer", "invalid_request"),
)


class Reason(msgspec.Struct):
    """The reason for an error: a code for programs, a message for people."""

    code: Code
    message: str


class ErrorAnswer(msgspec.Struct):
    """The body of every error response."""

    error: Reason
    request_id: str


class Failure(Exception):
    """An error that becomes a response.

    Args:
        code: the code for programs; it determines the status.
        message: the expected and the received value; never a secret.
        retry_after_s: seconds until a retry makes sense; sent in whole seconds, at least 1.

    Attributes:
        kind: what the code means.
        is_retryable: whether the gateway may send the image again.
        is_from_triton: whether it was Triton's response.
        is_inferred_from_status: whether the code follows only from the status of Triton's response.
    """

    def __init__(self, code: Code, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.retry_after_s = retry_after_s
        self.kind = ERROR_KINDS[code]
        self.is_retryable = self.kind.is_retryable
        self.is_from_triton = self.is_inferred_from_status = False
        self.more_headers: list[tuple[bytes, bytes]] = []

    @property
    def status(self) -> int:
        """The HTTP status for the code."""
        return self.kind.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response headers that depend on the error."""
        headers = [*self.more_headers]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, ceil(self.retry_after_s))).encode()))
        if self.code == "unauthenticated":
            headers.append((b"www-authenticate", b"Bearer"))
        if self.code == "body_timeout":  # the rest may never arrive
            headers.append((b"connection", b"close"))
        return headers

    @property
    def v2_message(self) -> str:
        """The message in the v2 protocol, with the prefix that clients recognize."""
        return self.kind.prefix + self.message

    @property
    def reason(self) -> Reason:
        """The error as a field of the response body."""
        return Reason(self.code, self.message)


def invalid_request(message: str) -> Failure:
    """Return the error response for a request that no server can run."""
    return Failure("invalid_request", message)


def malformed_response(reason: object) -> Failure:
    """Return the error response for a model whose outputs do not match its task."""
    return Failure("inference_failed", f"the model's response is malformed: {reason}")


def unreachable(hint: str) -> Failure:
    """Return the error response when the server did not respond, with a hint that may be empty."""
    reasons = filter(None, ("the server behind the gateway cannot be reached", hint))
    return Failure("unreachable", ": ".join(reasons), UNAVAILABLE_RETRY_S)


def from_triton(response: "HttpResponse") -> Failure:
    """Return the error response for a Triton error, hiding details that would help an attacker.

    The first known phrase in its text decides, because an ensemble adds its own text before it.
    """
    try:
        text = str(msgspec.json.decode(response.body)["error"])
    except (ValueError, LookupError, TypeError):
        text = ""
    if contract.SHARED_MEMORY_FULL_TEXT in text:
        return Failure("overloaded", contract.SHARED_MEMORY_FULL)
    hidden = _HIDDEN_REASON if _INTERNAL.search(text) else ""
    matches = [(text.find(phrase), phrase, code) for phrase, code in _TEXTS if phrase in text]
    if matches:
        _, phrase, code = min(matches)
        message = hidden or text.partition(phrase)[2] or text
    else:
        code = _CODE_BY_STATUS.get(response.status, "inference_failed")
        message = f"the server rejected the request; {_HIDDEN_REASON}" if hidden else text
    if code == "inference_failed":
        message = f"the server failed; {_HIDDEN_REASON}"
    failure = Failure(code, message, UNAVAILABLE_RETRY_S if code == "unavailable" else None)
    failure.is_from_triton, failure.is_inferred_from_status = True, not matches
    return failure

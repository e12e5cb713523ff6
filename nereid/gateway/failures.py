"""Error responses of the gateway: codes, statuses, messages and headers."""

from enum import IntEnum
from math import ceil
from typing import Literal

import msgspec

from nereid import contract
from nereid.client.classifier_errors import (
    ClassifierError,
    Overloaded,
    RequestRefused,
    TimedOut,
    Unavailable,
    Unreachable,
)

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
    """Statuses of gRPC. Source: grpc/doc/statuscodes.md."""

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


# The statuses of HTTP and of gRPC.
_STATUSES: dict[Code, tuple[int, GrpcStatus]] = {
    "invalid_image": (400, GrpcStatus.INVALID_ARGUMENT),
    "invalid_request": (400, GrpcStatus.INVALID_ARGUMENT),
    "unauthenticated": (401, GrpcStatus.UNAUTHENTICATED),
    "forbidden": (403, GrpcStatus.PERMISSION_DENIED),
    "not_found": (404, GrpcStatus.NOT_FOUND),
    "no_route_control": (404, GrpcStatus.NOT_FOUND),
    "unknown_request": (404, GrpcStatus.NOT_FOUND),
    "method_not_allowed": (405, GrpcStatus.UNIMPLEMENTED),
    "body_timeout": (408, GrpcStatus.DEADLINE_EXCEEDED),
    "conflict": (409, GrpcStatus.ABORTED),
    "too_large": (413, GrpcStatus.INVALID_ARGUMENT),
    "unsupported_media_type": (415, GrpcStatus.UNIMPLEMENTED),
    "unencodable_text": (422, GrpcStatus.INVALID_ARGUMENT),
    "rate_limited": (429, GrpcStatus.RESOURCE_EXHAUSTED),
    "overloaded": (429, GrpcStatus.RESOURCE_EXHAUSTED),
    "inference_failed": (500, GrpcStatus.INTERNAL),
    "unavailable": (503, GrpcStatus.UNAVAILABLE),
    "unreachable": (503, GrpcStatus.UNAVAILABLE),
    "deadline_exceeded": (504, GrpcStatus.DEADLINE_EXCEEDED),
}
STATUS: dict[Code, int] = {code: status for code, (status, _) in _STATUSES.items()}
UNAVAILABLE_RETRY_S = 1.0
# First words of a message in the v2 protocol, where a client has no code.
PREFIXES: dict[Code, str] = {
    "invalid_image": contract.INVALID_IMAGE_PREFIX,
    "invalid_request": contract.INVALID_REQUEST_PREFIX,
    "overloaded": contract.OVERLOADED_PREFIX,
    "deadline_exceeded": contract.DEADLINE_EXCEEDED_PREFIX,
    "unavailable": contract.UNAVAILABLE_PREFIX,
    "unreachable": contract.UNAVAILABLE_PREFIX,
    "inference_failed": contract.INFERENCE_FAILED_PREFIX,
}


class Reason(msgspec.Struct):
    """The reason of an error: a code for programs, a message for people."""

    code: Code
    message: str


class ErrorAnswer(msgspec.Struct):
    """The body of every error response."""

    error: Reason
    request_id: str


class Failure(Exception):
    """An error that becomes a response.

    Args:
        code: the code for programs; it decides the status.
        message: the expected and the received value; never a secret.
        retry_after_s: seconds until a retry makes sense; sent in whole seconds, at least 1.
    """

    def __init__(self, code: Code, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """The HTTP status of the code."""
        return STATUS[self.code]

    @property
    def grpc_status(self) -> GrpcStatus:
        """The gRPC status of the code."""
        return _STATUSES[self.code][1]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the response that depend on the error."""
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, ceil(self.retry_after_s))).encode()))
        if self.code == "unauthenticated":
            headers.append((b"www-authenticate", b"Bearer"))
        if self.code == "body_timeout":  # the rest may never arrive
            headers.append((b"connection", b"close"))
        return headers

    @property
    def v2_message(self) -> str:
        """The message in the v2 protocol, with the words that clients recognize."""
        return PREFIXES.get(self.code, "") + self.message

    @property
    def reason(self) -> Reason:
        """The error as a field of the response body."""
        return Reason(self.code, self.message)


def invalid_request(message: str) -> Failure:
    """Return the error response to a request that no server can run."""
    return Failure("invalid_request", message)


def unreachable(hint: str) -> Failure:
    """Return the error response if no response came from the server, with a hint that may be empty."""
    reasons = filter(None, ("the server behind the gateway cannot be reached", hint))
    return Failure("unreachable", ": ".join(reasons), UNAVAILABLE_RETRY_S)


def from_classifier(error: ClassifierError, timeout_s: float, retry_after_s: float) -> Failure:
    """Return the error response to a failed inference.

    Only messages about the caller's own request are passed on. Others name addresses and internals of the
    server.

    Args:
        error: the error of the classifier.
        timeout_s: the caller's timeout.
        retry_after_s: seconds until a slot is expected to be free.
    """
    text = str(error)
    match error:
        case Overloaded():
            return Failure("overloaded", "too many images are in flight; retry later", retry_after_s)
        case TimedOut():
            return Failure("deadline_exceeded", f"no response within {timeout_s:.3g} s")
        case RequestRefused() if contract.INVALID_IMAGE_PREFIX in text:
            return Failure("invalid_image", text.partition(contract.INVALID_IMAGE_PREFIX)[2])
        case RequestRefused() if contract.INVALID_REQUEST_PREFIX in text:
            return invalid_request(text.partition(contract.INVALID_REQUEST_PREFIX)[2])
        case Unavailable() | RequestRefused():
            return Failure("unavailable", "the requested model is not served", UNAVAILABLE_RETRY_S)
        case Unreachable():
            return unreachable(error.hint)
    return Failure("inference_failed", "the server failed; the logs of server and gateway have the reason")

"""What the gateway answers when it does not answer with what was asked for."""

from math import ceil
from typing import Literal

import msgspec

from nereid.client.classifier_errors import (
    ClassifierError,
    Overloaded,
    RequestRefused,
    TimedOut,
    Unavailable,
    Unreachable,
)
from nereid.contract import INVALID_IMAGE_PREFIX, INVALID_REQUEST_PREFIX

Code = Literal[
    "invalid_image",
    "invalid_request",
    "unauthenticated",
    "forbidden",
    "not_found",
    "no_route_control",
    "method_not_allowed",
    "body_timeout",
    "conflict",
    "too_large",
    "unsupported_media_type",
    "rate_limited",
    "overloaded",
    "inference_failed",
    "unavailable",
    "unreachable",
    "deadline_exceeded",
]
STATUS: dict[Code, int] = {
    "invalid_image": 400,
    "invalid_request": 400,
    "unauthenticated": 401,
    "forbidden": 403,
    "not_found": 404,
    "no_route_control": 404,
    "method_not_allowed": 405,
    "body_timeout": 408,
    "conflict": 409,
    "too_large": 413,
    "unsupported_media_type": 415,
    "rate_limited": 429,
    "overloaded": 429,
    "inference_failed": 500,
    "unavailable": 503,
    "unreachable": 503,
    "deadline_exceeded": 504,
}
# The rest of the body may be long in coming, or never come: the connection is of no more use.
CLOSING = frozenset({"body_timeout", "too_large"})
UNAVAILABLE_RETRY_S = 1.0


class Reason(msgspec.Struct):
    """What was wrong: a code for programs, a message for people."""

    code: Code
    message: str


class ErrorAnswer(msgspec.Struct):
    """The body of every answer that is an error."""

    error: Reason
    request_id: str


class Failure(Exception):
    """An answer with an error.

    Args:
        code: what programs tell it by; it decides the status.
        message: what was expected and what came; nothing of it is secret.
        retry_after_s: when to come again; answered in whole seconds, at least 1.
    """

    def __init__(self, code: Code, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code: Code = code
        self.message = message
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.code]

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """What the answer's head says beside its status."""
        headers = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(max(1, ceil(self.retry_after_s))).encode()))
        if self.code == "unauthenticated":
            headers.append((b"www-authenticate", b"Bearer"))
        if self.code in CLOSING:
            headers.append((b"connection", b"close"))
        return headers

    @property
    def reason(self) -> Reason:
        """The error as an answer's body holds it."""
        return Reason(self.code, self.message)


def from_classifier(error: ClassifierError, timeout_s: float, retry_after_s: float) -> Failure:
    """Return the answer to a failed inference.

    Only what is said of the caller's own request is handed on: other messages name addresses and insides of
    the server.

    Args:
        error: what the classifier raised.
        timeout_s: how long the caller was willing to wait.
        retry_after_s: when there will be room again.
    """
    text = str(error)
    match error:
        case Overloaded():
            return Failure("overloaded", "too many images are in flight; come later", retry_after_s)
        case TimedOut():
            return Failure("deadline_exceeded", f"no answer within {timeout_s:.3g} s")
        case RequestRefused() if INVALID_IMAGE_PREFIX in text:
            return Failure("invalid_image", text.partition(INVALID_IMAGE_PREFIX)[2])
        case RequestRefused() if INVALID_REQUEST_PREFIX in text:
            return Failure("invalid_request", text.partition(INVALID_REQUEST_PREFIX)[2])
        case Unavailable() | RequestRefused():
            return Failure("unavailable", "the model that would answer is not served", UNAVAILABLE_RETRY_S)
        case Unreachable():
            return Failure(
                "unreachable", "the server behind the gateway cannot be reached", UNAVAILABLE_RETRY_S
            )
    return Failure("inference_failed", "the server failed; its log and the gateway's say why")

"""Errors of clients and the party at fault; the classes are the same for every transport.

    NereidError
    ├── UnusableImage       caller    an image in `classify_many` cannot be read or encoded; nothing was sent
    ├── RequestRefused      caller    the request is invalid; repeating it fails the same way
    └── ServerFailed        server    the server accepted the request and failed
        ├── Overloaded      server    the server rejected the request without running it
        ├── TimedOut        server    no response in time; the server may still be computing it
        ├── Unavailable     server    the model is not loaded and has not seen the request
        └── Unreachable     network   no connection, a broken connection, or the peer is not Triton

The texts that identify a class are part of the wire contract: docs/contract.md.
"""

import errno
import re
import socket
from typing import TYPE_CHECKING, ClassVar, Literal

from nereid.base import contract

if TYPE_CHECKING:
    from tritonclient.utils import InferenceServerException

ErrorSource = Literal["caller", "server", "network"]


class NereidError(Exception):
    """Base class of the errors of all clients; the message is the server's own.

    Attributes:
        fault: the party at fault: `caller`, `server` or `network`.
        is_repeatable: whether the client may send the request again.
        image: name of the image, as in `Prediction`, for an outcome of `classify_many`; otherwise empty.
    """

    fault: ClassVar[ErrorSource] = "server"
    is_repeatable: ClassVar[bool] = False
    image: str = ""


ClassifierError = NereidError  # its former name, deprecated


class UnusableImage(NereidError):
    """An image in `classify_many` cannot be read or encoded; `__cause__` is what `classify` would raise."""

    fault = "caller"


class RequestRefused(NereidError):
    """The request is invalid; repeating it fails the same way."""

    fault = "caller"


class ServerFailed(NereidError):
    """The server accepted the request and failed."""


class Overloaded(ServerFailed):
    """The server is overloaded and rejected the request without running it; a retry adds load."""


class TimedOut(ServerFailed):
    """The response did not arrive in time; the server may still be computing it."""


class Unavailable(ServerFailed):
    """The model is not loaded and has not seen the request."""

    is_repeatable = True


class Unreachable(ServerFailed):
    """The server is unreachable, the connection broke, or the peer is not a Triton server.

    Attributes:
        hint: the likely cause and what to do; empty if unknown.
    """

    fault = "network"
    is_repeatable = True
    hint: str = ""


# HTTP and gRPC statuses; all others are server failures.
_STATUSES: dict[str | None, type[NereidError]] = {
    **dict.fromkeys(("400", "401", "403", "404", "413"), RequestRefused),
    "StatusCode.INVALID_ARGUMENT": RequestRefused,
    "StatusCode.UNAUTHENTICATED": RequestRefused,
    "StatusCode.PERMISSION_DENIED": RequestRefused,
    "StatusCode.NOT_FOUND": RequestRefused,
    "StatusCode.DEADLINE_EXCEEDED": TimedOut,
    "429": Overloaded,
    "StatusCode.RESOURCE_EXHAUSTED": Overloaded,
    # The request reached no server. Triton also uses both when it sheds load.
    "StatusCode.UNAVAILABLE": Unreachable,
    "StatusCode.CANCELLED": Unreachable,
}
_ERRORS: dict[str, type[NereidError]] = {
    **dict.fromkeys(("invalid_request", "invalid_image"), RequestRefused),
    **dict.fromkeys(("inference_failed", "cancelled", "stub_died"), ServerFailed),
    "overloaded": Overloaded,
    "deadline_exceeded": TimedOut,
    "unavailable": Unavailable,
}
_SERVER_TEXTS: tuple[tuple[str, type[NereidError]], ...] = (
    *((text, _ERRORS[code]) for text, code in contract.CODES_BY_TEXT.items()),
    (contract.RESTRICTED_TEXT, RequestRefused),
    ("Unable to find shared memory region", Unavailable),
)
_TEXTS: tuple[tuple[str, type[NereidError]], ...] = (
    *_SERVER_TEXTS,
    # Messages from gRPC on either side, from proxies, and from tritonclient about a response without JSON.
    ("message larger than max", RequestRefused),
    ("http2 header with status: 413", RequestRefused),
    ("client while decoding the response", Unreachable),
    # gRPC's message when a proxy ends a stream because the server behind it died. With another reason, the
    # same message carries a deadline status.
    ("Stream removed (Data frame with END_STREAM", Unreachable),
)
_LISTENS = (
    "listens there; fix: nereid serve, or the address of a server, by default port "
    f"{contract.HTTP_PORT} for HTTP and {contract.GRPC_PORT} for gRPC"
)
# What the client sees on a port that does not serve its protocol, and the hint to show.
_PORTS: tuple[tuple[str, str], ...] = (
    # HTTP/2's SETTINGS frame on stream 0, which a gRPC server sends first (RFC 9113, section 3.4).
    (r"...\x04\0{5}", f"the port speaks gRPC; fix: Triton's HTTP port, by default {contract.HTTP_PORT}"),
    (
        "failed to connect .* http1.x server",
        f"the port speaks HTTP; fix: Triton's gRPC port, by default {contract.GRPC_PORT}",
    ),
    # Triton's HTTP and metrics ports close a connection that is not HTTP.
    (
        "failed to connect .*: Socket closed",
        f"the port does not speak gRPC, or the server is ending; fix: Triton's gRPC port, by default "
        f"{contract.GRPC_PORT}",
    ),
    (rf"(Multiple exceptions: )?\[Errno ({errno.ECONNREFUSED}|{errno.ENOENT})\]", f"no server {_LISTENS}"),
    # gRPC reports only the last address's error; the host may serve HTTP on another address.
    ("failed to connect .*: (Connection refused|No such file or directory)", f"no gRPC server {_LISTENS}"),
    (rf"\[Errno {socket.EAI_NONAME}\]|errors resolving", "unknown host name; fix: the address of a server"),
)


def connection_hint(text: str) -> str:
    """Return why an error text says no connection is possible, and what to do; empty if unknown."""
    return next((hint for pattern, hint in _PORTS if re.match(pattern, text, re.DOTALL)), "")


def is_overload(text: str) -> bool:
    """Return whether a server rejected a request because it was overloaded."""
    return any(phrase in text for phrase, kind in _SERVER_TEXTS if kind is Overloaded)


def is_final(error: NereidError) -> bool:
    """Return whether an error proves that the server has finished with the request.

    Statuses prove nothing, because gRPC reports broken streams with the same statuses as Triton's responses.
    """
    if isinstance(error, TimedOut):
        return False
    return isinstance(error, RequestRefused) or any(phrase in str(error) for phrase, _ in _SERVER_TEXTS)


def from_triton(error: "InferenceServerException") -> NereidError:
    """Return the error for a tritonclient exception: an error response from Triton or a transport failure."""
    status, text = error.status(), error.message() or str(error)
    matches = [(text.find(phrase), kind) for phrase, kind in _TEXTS if phrase in text]
    if matches:
        return min(matches, key=lambda pair: pair[0])[1](text)
    return _STATUSES.get(status, ServerFailed)(text)

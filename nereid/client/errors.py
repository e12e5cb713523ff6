"""What a classifier raises, and whose fault it was: the same classes over every transport.

    ClassifierError
    ├── RequestRefused    caller    the request itself: the same one will be refused again
    ├── ServerFailed      server    it took the request, and failed
    ├── Overloaded        server    it took none: too much at once, so not again at once
    ├── TimedOut          server    no answer in time; it may still be computed
    ├── Unavailable       server    the model is not there: it has not seen the request
    └── Unreachable       network   no connection, or one that broke

The texts that tell them apart are part of the server's contract: docs/contract.md.
"""

from typing import ClassVar, Literal

from tritonclient.utils import InferenceServerException

from nereid import contract

Fault = Literal["caller", "server", "network"]
# The statuses that say the request itself was at fault, as each protocol spells them.
REFUSED = (
    "400",
    "401",
    "403",
    "404",
    "413",
    "StatusCode.INVALID_ARGUMENT",
    "StatusCode.UNAUTHENTICATED",
    "StatusCode.PERMISSION_DENIED",
    "StatusCode.NOT_FOUND",
)
# gRPC's own words for a call that reached no server have these statuses, and so has what Triton sheds.
NOT_ANSWERED = ("StatusCode.UNAVAILABLE", "StatusCode.CANCELLED")
LATE = ("StatusCode.DEADLINE_EXCEEDED",)
BUSY = ("429", "StatusCode.RESOURCE_EXHAUSTED")


class ClassifierError(Exception):
    """Base of what a classifier raises; the message is the server's own."""

    fault: ClassVar[Fault] = "server"
    is_repeatable: ClassVar[bool] = False


class RequestRefused(ClassifierError):
    """The request was at fault: the same one will be refused again."""

    fault = "caller"


class ServerFailed(ClassifierError):
    """The server took the request, and failed."""


class Overloaded(ServerFailed):
    """The server has too much to do, and took no notice of the request; sending it again makes it worse."""


class TimedOut(ServerFailed):
    """The answer did not come in time; it may still be computed."""


class Unavailable(ServerFailed):
    """The model that would answer is not there; it has not seen the request."""

    is_repeatable = True


class Unreachable(ServerFailed):
    """The server cannot be reached, the connection broke, or what answers there is no Triton."""

    fault = "network"
    is_repeatable = True


# Where each text stands in a message is not fixed: an ensemble puts its own words in front.
_TRITONS: tuple[tuple[str, type[ClassifierError]], ...] = (
    (contract.INVALID_REQUEST_PREFIX, RequestRefused),
    (contract.INVALID_IMAGE_PREFIX, RequestRefused),
    (contract.INFERENCE_FAILED_PREFIX, ServerFailed),
    (contract.OVERLOADED_PREFIX, Overloaded),
    (contract.DEADLINE_EXCEEDED_PREFIX, TimedOut),
    (contract.UNAVAILABLE_PREFIX, Unavailable),
    (contract.CANCELLED_PREFIX, ServerFailed),
    (contract.QUEUE_FULL_TEXT, Overloaded),
    (contract.QUEUE_TIMEOUT_TEXT, TimedOut),
    (contract.NOT_HEALTHY_TEXT, ServerFailed),
    (contract.NOT_READY_TEXT, Unavailable),
    (contract.RESTRICTED_TEXT, RequestRefused),
    ("Unable to find shared memory region", Unavailable),
)
_TEXTS: tuple[tuple[str, type[ClassifierError]], ...] = (
    *_TRITONS,
    # gRPC's, of either side or before a proxy, and tritonclient's of an answer that has no JSON.
    ("message larger than max", RequestRefused),
    ("http2 header with status: 413", RequestRefused),
    ("client while decoding the response", Unreachable),
)


def tells_of_load(text: str) -> bool:
    """Tell whether a server's refusal says that there was too much at once."""
    return any(words in text for words, kind in _TRITONS if kind is Overloaded)


def is_answer(error: BaseException) -> bool:
    """Tell whether a server is surely done with a request: it has said itself how that ended.

    gRPC has the statuses of Triton's answers for streams that broke, too.
    """
    if isinstance(error, TimedOut) or not isinstance(error, ClassifierError):
        return False
    return isinstance(error, RequestRefused) or any(words in str(error) for words, _ in _TRITONS)


def from_triton(error: InferenceServerException) -> ClassifierError:
    """Return the error that Triton's answer, or the transport's failure, means."""
    status, text = error.status(), error.message() or str(error)
    found = [(text.find(words), kind) for words, kind in _TEXTS if words in text]
    if found:
        return min(found, key=lambda pair: pair[0])[1](text)
    for statuses, kind in ((REFUSED, RequestRefused), (LATE, TimedOut), (BUSY, Overloaded)):
        if status in statuses:
            return kind(text)
    return Unreachable(text) if status in NOT_ANSWERED else ServerFailed(text)


def from_failure(url: str, error: Exception) -> ClassifierError:
    """Return the error that whatever a transport raised means."""
    if isinstance(error, InferenceServerException):
        return from_triton(error)
    return Unreachable(f"{url}: {type(error).__name__}: {error}")

"""Everything a request or a model load can be refused for, in one tree.

    ServingError
    ├── InvalidRequest      INVALID_ARG   the caller's fault
    │   └── InvalidImage    INVALID_ARG   the caller's image cannot be used
    ├── InferenceFailed     INTERNAL      ours
    │   └── RuntimeFailed   INTERNAL      ONNX Runtime's own words, with NVIDIA's text and no prefix
    ├── Overloaded          UNAVAILABLE   too much at once: later, or elsewhere
    ├── DeadlineExceeded    UNAVAILABLE   the answer took longer than it may
    ├── Unavailable         UNAVAILABLE   a model cannot be reached: it has not seen the request
    │   └── Died            UNAVAILABLE   its process is dead, perhaps of this very request
    ├── Cancelled           CANCELLED     nobody waits for the answer any more
    └── InvalidConfig       INVALID_ARG   raised at load: the model's config.pbtxt

The class decides Triton's code. An error that passes through BLS or an ensemble keeps only its text,
so those a client may get from there have a message prefix, from which `from_message` finds the class again.
"""

import re
from typing import ClassVar


class ServingError(Exception):
    """Base of all errors; `code` names a `TritonError` code, `prefix` starts every message of the class."""

    code: ClassVar[str] = "INTERNAL"
    prefix: ClassVar[str] = "error: "

    @property
    def outcome(self) -> str:
        """The class as a metric's label, such as `invalid_image`."""
        return self.prefix.strip(": ").replace(" ", "_")

    def __str__(self) -> str:
        return self.prefix + super().__str__()


class InvalidRequest(ServingError):
    """The request cannot be served as it is; sending it again gives the same answer."""

    code = "INVALID_ARG"
    prefix = "invalid request: "


class InvalidImage(InvalidRequest):
    """The bytes sent are not an image this model can decode."""

    prefix = "invalid image: "


class InferenceFailed(ServingError):
    """The runtime failed on a request that looked right."""

    prefix = "inference failed: "


class RuntimeFailed(InferenceFailed):
    """ONNX Runtime refused or failed; `onnx runtime error CODE: …`, as NVIDIA's backend says it."""

    prefix = ""


class Overloaded(ServingError):
    """More requests are in flight than are let in; sending it again at once makes it worse."""

    code = "UNAVAILABLE"
    prefix = "overloaded: "


class DeadlineExceeded(ServingError):
    """The answer did not come in time; it may still be computed."""

    code = "UNAVAILABLE"
    prefix = "deadline exceeded: "


class Unavailable(ServingError):
    """The model that would answer is not there: it has not seen the request."""

    code = "UNAVAILABLE"
    prefix = "unavailable: "


class Died(Unavailable):
    """The process of the model that would answer is dead: since before, or because of this request."""


class Cancelled(ServingError):
    """The client has gone; there is nothing to compute."""

    code = "CANCELLED"
    prefix = "cancelled: "


class InvalidConfig(ServingError):
    """A model's configuration cannot be served: fails the load, so it has Triton's texts and no prefix."""

    code = "INVALID_ARG"
    prefix = ""


def official_text(error: Exception) -> str:
    """Say on one line what ONNX Runtime raised, as NVIDIA does: `onnx runtime error CODE: MESSAGE`."""
    text = str(error)
    found = re.match(r"\[ONNXRuntimeError\] : (?P<code>\d+) : \w+ : (?P<message>.*)", text, re.DOTALL)
    code, message = (found["code"], found["message"]) if found else ("1", text)
    return f"onnx runtime error {code}: {' '.join(message.split())}"


def from_exception(error: Exception) -> ServingError:
    """Return what a request that raised `error` is answered with: an error of this tree as it is."""
    if not isinstance(error, ServingError):
        return InferenceFailed(f"{type(error).__name__}: {error}")
    # Kept with its frames, and those of what it was raised over, it would hold the request for the collector.
    error.__traceback__ = error.__context__ = None
    return error


def from_message(message: str) -> ServingError:
    """Restore the error whose text a BLS call or an ensemble handed on.

    Triton may put its own words in front (`in ensemble 'classify_v1', …`), so the prefix is looked for
    anywhere; the first one in the text wins. Some texts are Triton's own. Any other is `InferenceFailed`.
    """
    found = [(message.find(cls.prefix), cls) for cls in _RESTORABLE if cls.prefix in message]
    if not found:
        return next((cls for text, cls in _TRITON_TEXTS if text in message), InferenceFailed)(message)
    start, cls = min(found, key=lambda pair: pair[0])
    return cls(message[start + len(cls.prefix) :])


_RESTORABLE: tuple[type[ServingError], ...] = (
    InvalidRequest,
    InvalidImage,
    InferenceFailed,
    Overloaded,
    DeadlineExceeded,
    Unavailable,
    Cancelled,
)
# Source: core and python_backend r24.10; each was seen.
_TRITON_TEXTS: tuple[tuple[str, type[ServingError]], ...] = (
    ("Exceeds maximum queue size", Overloaded),
    ("Request timeout expired", DeadlineExceeded),
    ("is not healthy", Died),
    ("is not ready", Unavailable),
)

"""Everything a request or a model load can be refused for, in one tree.

    ServingError
    ├── InvalidRequest      INVALID_ARG   the caller's fault
    │   └── InvalidImage    INVALID_ARG   the caller's image cannot be used
    ├── InferenceFailed     INTERNAL      ours
    │   └── RuntimeFailed   INTERNAL      ONNX Runtime's own words, with NVIDIA's text and no prefix
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
    return error if isinstance(error, ServingError) else InferenceFailed(f"{type(error).__name__}: {error}")


def from_message(message: str) -> ServingError:
    """Restore the error whose text a BLS call or an ensemble handed on.

    Triton may put its own words in front (`in ensemble 'classify_v1', …`), so the prefix is looked for
    anywhere; the first one in the text wins. Without any, the error is `InferenceFailed`.
    """
    found = [(message.find(cls.prefix), cls) for cls in _RESTORABLE if cls.prefix in message]
    if not found:
        return InferenceFailed(message)
    start, cls = min(found, key=lambda pair: pair[0])
    return cls(message[start + len(cls.prefix) :])


_RESTORABLE: tuple[type[ServingError], ...] = (InvalidRequest, InvalidImage, InferenceFailed)

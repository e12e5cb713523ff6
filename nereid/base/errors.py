"""Errors: the class determines a command's exit code and an inference's Triton error code."""

import contextlib
from collections.abc import Iterator
from typing import ClassVar

from nereid.base import contract

# CUDA errors after which the process must be replaced or the device is gone. Others, such as an invalid
# value, are caused by the network or its input. Source: cudaError_t, CUDA 12.6, driver_types.h.
DEVICE_FAILURE_CODES = frozenset(
    {
        *(3, 4),  # not initialised, unloading
        *(46, 100, 101),  # unavailable, no device, invalid device
        *(214, 220, 226),  # uncorrectable memory, NVLink and contained errors
        *(700, 702, 709, 710),  # illegal address, launch timeout, destroyed context, assertion
        *(714, 715, 716, 717, 718, 719),  # kernel errors
        *(802, 805, 806, 807),  # the system, or the MPS server, is not ready
        999,
    }
)


class ServingError(Exception):
    """Base of all errors; `code` names a `TritonError` code, `prefix` starts every message of that class."""

    code: ClassVar[str] = "INTERNAL"
    prefix: ClassVar[str] = "error: "

    @property
    def outcome(self) -> str:
        """The class's label in metrics, such as `invalid_image`."""
        return self.prefix.strip(": ").replace(" ", "_")

    def __str__(self) -> str:
        return self.prefix + super().__str__()


class InvalidRequest(ServingError):
    """The request is invalid; repeating it fails the same way."""

    code = "INVALID_ARG"
    prefix = contract.INVALID_REQUEST_PREFIX


class InvalidImage(InvalidRequest):
    """The bytes are not an image that this model can decode."""

    prefix = contract.INVALID_IMAGE_PREFIX


class InferenceFailed(ServingError):
    """The runtime failed on a request that looked valid."""

    prefix = contract.INFERENCE_FAILED_PREFIX


class RuntimeFailed(InferenceFailed):
    """ONNX Runtime rejected the request or failed; the message is NVIDIA's `onnx runtime error CODE: …`."""

    prefix = ""


class OutOfMemory(RuntimeFailed):
    """ONNX Runtime could not allocate memory for a run; a smaller batch may fit."""


class Overloaded(ServingError):
    """Too many requests are in flight; an immediate retry increases the overload."""

    code = "UNAVAILABLE"
    prefix = contract.OVERLOADED_PREFIX


class DeadlineExceeded(ServingError):
    """The response did not arrive in time; it may still be computed."""

    code = "UNAVAILABLE"
    prefix = contract.DEADLINE_EXCEEDED_PREFIX


class Unavailable(ServingError):
    """The model is unreachable and did not receive the request."""

    code = "UNAVAILABLE"
    prefix = contract.UNAVAILABLE_PREFIX


class StubDied(Unavailable):
    """The model's process died, either on an earlier request or because of this one."""


class DeviceFailed(Unavailable):
    """An instance's device failed, so the instance must be replaced: a broken CUDA context stays broken.

    Args:
        reason: the error text from ONNX Runtime or CuPy.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(contract.DEVICE_FAILED + reason)
        self.reason = reason


class Cancelled(ServingError):
    """The client disconnected; the request is not computed."""

    code = "CANCELLED"
    prefix = contract.CANCELLED_PREFIX


class InvalidConfig(ServingError):
    """A model's configuration is invalid; loading fails with Triton's own messages and no prefix."""

    code = "INVALID_ARG"
    prefix = ""


def is_fault(error: ServingError | None) -> bool:
    """Return whether the server is at fault, rather than the caller or a deliberate limit."""
    return error is not None and not isinstance(error, InvalidRequest | Overloaded | Cancelled)


def find_device_failure(error: Exception) -> DeviceFailed | None:
    """Return the device failure if that is why CuPy raised `error`, whose `status` is the CUDA error code.

    CuPy raises `CUDADriverError` when it launches a kernel, and `CUDARuntimeError` elsewhere.
    """
    if (
        type(error).__name__ in ("CUDADriverError", "CUDARuntimeError")
        and getattr(error, "status", None) in DEVICE_FAILURE_CODES
    ):
        return DeviceFailed(f"{type(error).__name__}: {error}")
    return None


def from_exception(error: Exception) -> ServingError:
    """Return the serving error for a request that raised `error`: `error` itself if it already is one."""
    if not isinstance(error, ServingError):
        return find_device_failure(error) or InferenceFailed(f"{type(error).__name__}: {error}")
    # The frames of the traceback and context would keep the request in memory until garbage collection.
    error.__traceback__ = error.__context__ = None
    return error


def from_message(message: str) -> ServingError:
    """Restore the error whose text was passed on by BLS or an ensemble.

    Triton may insert its own text before it (`in ensemble 'classify_v1', …`), so the first known text in the
    message decides. A message without one becomes `InferenceFailed`.
    """
    if contract.SHARED_MEMORY_FULL_TEXT in message:
        return Overloaded(contract.SHARED_MEMORY_FULL)
    matches = [(message.find(text), text) for text in contract.CODES_BY_TEXT if text in message]
    if not matches:
        return InferenceFailed(message)
    start, text = min(matches)
    error = _ERRORS[contract.CODES_BY_TEXT[text]]
    return error(message[start + len(text) :] if text == error.prefix else message)


_ERRORS: dict[str, type[ServingError]] = {
    "invalid_request": InvalidRequest,
    "invalid_image": InvalidImage,
    "inference_failed": InferenceFailed,
    "overloaded": Overloaded,
    "deadline_exceeded": DeadlineExceeded,
    "unavailable": Unavailable,
    "cancelled": Cancelled,
    "stub_died": StubDied,
}


class OperationFailed(Exception):
    """The requested operation failed; the message is `REASON`, or `REASON; fix: FIX`."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(f"{reason}; fix: {fix}" if fix else reason)
        self.reason, self.fix = reason, fix


class WrongUsage(OperationFailed):
    """The request itself is invalid: an unknown name, or options that exclude each other."""


class ServerError(OperationFailed):
    """The server cannot start, or exited by itself."""


def no_server(repository: object, alternative: str = "") -> OperationFailed:
    """Return the error if no server is running for a repository; `alternative` completes the fix."""
    return OperationFailed(f"no server is running for '{repository}'", f"nereid serve{alternative}")


@contextlib.contextmanager
def value_errors_as_wrong_usage(prefix: str = "") -> Iterator[None]:
    """Turn a `ValueError` about an option into `WrongUsage`, whose message starts with `prefix`."""
    try:
        yield
    except ValueError as error:
        raise WrongUsage(f"{prefix}{error}") from None

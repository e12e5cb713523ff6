"""Requests, responses and log of Triton's Python API, converted from and to arrays."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from nereid.backends.routing.interfaces import check_deadline
from nereid.base.config.model_config import ModelConfig
from nereid.base.contract import IMAGE, PROBE_HEADER, format_failed_device
from nereid.base.errors import InvalidRequest, ServingError, from_exception
from nereid.vision.imaging.image_times import ProbeImage

if TYPE_CHECKING:  # image libraries cost time and memory, and only some backends need them
    from nereid.vision.imaging.pipeline import Batch


def read_images(request: Any) -> list[bytes] | ServingError:
    """Return the encoded images of one request, its tensor `image`, BYTES [N, 1], or its error."""
    return read_request(request)[0]


def read_request(request: Any) -> tuple[list[bytes] | ServingError, Mapping[str, Any]]:
    """Return the encoded images of one request, or its error, and its parameters.

    Unreadable parameters are an error, and are then empty.
    """
    parameters: Mapping[str, Any] = {}
    try:
        parameters = read_parameters(request)
        check_deadline(parameters)
    except ServingError as error:
        return from_exception(error), parameters
    images = pb_utils.get_input_tensor_by_name(request, IMAGE).as_numpy().ravel()
    return [*map(ProbeImage, images)] if PROBE_HEADER in parameters else list(images), parameters


def read_tensors(request: Any, is_on_gpu: bool = False) -> dict[str, Any]:
    """Return the request's input tensors by name; they live as long as the request.

    Args:
        is_on_gpu: tensors on a GPU stay there, as CuPy arrays; otherwise all are NumPy arrays.
    """
    return {tensor.name(): _array(tensor, is_on_gpu) for tensor in request.inputs()}


def read_parameters(request: Any) -> dict[str, Any]:
    """Return the request's parameters; forwarded headers are among them.

    Raises:
        InvalidRequest: a header is not UTF-8; Triton forwards any bytes.
    """
    try:
        return dict(json.loads(request.parameters() or "{}"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"headers must be UTF-8: {error}") from None


def respond(**tensors: Any) -> Any:
    """Build a response from arrays, or from tensors that another model produced."""
    return pb_utils.InferenceResponse([_tensor(name, value) for name, value in tensors.items()])


def reject(error: ServingError) -> Any:
    """Build the response that rejects one request; raising instead would fail the whole batch."""
    code = getattr(pb_utils.TritonError, error.code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))


def to_response(outcome: Mapping[str, Any] | ServingError) -> Any:
    """Build the response of one request: its tensors, or its error."""
    return reject(outcome) if isinstance(outcome, ServingError) else respond(**outcome)


def send_response(sender: Any, response: Any) -> None:
    """Send the only response of a request, from any thread, after `execute` has returned None."""
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def send_or_log(sender: Any, response: Any) -> None:
    """Send the only response of a request; an error is logged, because other requests need responses."""
    try:
        send_response(sender, response)
    except Exception as error:
        log_error(f"a response was not sent: {type(error).__name__}: {error}")


def respond_to_batch(batch: "Batch", **tensors: np.ndarray) -> list[Any]:
    """Build the response of each request of `batch`: its rows of `tensors`, or its error."""
    return [
        reject(rows)
        if isinstance(rows, ServingError)
        else respond(**{n: t[rows] for n, t in tensors.items()})
        for rows in batch.outcomes
    ]


def log_info(message: str) -> None:
    """Write a line to Triton's log."""
    pb_utils.Logger.log_info(message)  # the stub adds Logger only after this module is imported


def log_warn(message: str) -> None:
    """Write a warning to Triton's log."""
    pb_utils.Logger.log_warn(message)


def log_error(message: str) -> None:
    """Write an error to Triton's log."""
    pb_utils.Logger.log_error(message)


def report_failed_device(config: ModelConfig, reason: str) -> None:
    """Log to Triton that this process's device has failed, so that the supervisor replaces the process."""
    log_error(format_failed_device(os.getpid(), f"'{config.name}' version {config.version}", reason))


def version_folder(document: Mapping[str, Any]) -> Path:
    """Return the version folder of the model that Triton auto-completes."""
    folder = Path(pb_utils.get_model_dir())
    # Triton returns the folder of the model file, whose name may contain a path.
    depth = len(Path(document.get("default_model_filename") or "model.onnx").parts) - 1
    return folder.parents[depth - 1] if depth else folder


def _array(tensor: Any, is_on_gpu: bool) -> Any:
    if tensor.is_cpu():
        return tensor.as_numpy()
    import cupy

    array = cupy.from_dlpack(tensor)
    return array if is_on_gpu else array.get()


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return pb_utils.Tensor(name, value)
    return value if isinstance(value, pb_utils.Tensor) else pb_utils.Tensor.from_dlpack(name, value)

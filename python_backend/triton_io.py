"""Between Triton's Python objects and arrays: the only library module that imports `pb_utils`."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from python_backend.errors import InvalidRequest, ServingError
from python_backend.pipeline import Batch


def read_images(request: Any) -> list[bytes]:
    """Return the encoded images of one request: its tensor `image`, BYTES [N, 1]."""
    return list(pb_utils.get_input_tensor_by_name(request, "image").as_numpy().ravel())


def read_tensors(request: Any, names: Sequence[str]) -> list[np.ndarray]:
    """Return the request's input tensors in the order of `names`; they live as long as the request."""
    return [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names]


def read_parameters(request: Any) -> dict[str, str]:
    """Return the request's parameters; forwarded headers are among them.

    Raises:
        InvalidRequest: a header is not UTF-8, which is what Triton hands on.
    """
    try:
        return dict(json.loads(request.parameters() or "{}"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"headers must be UTF-8: {error}") from None


def answer(**tensors: Any) -> Any:
    """Build a response from arrays, or from tensors that another model made."""
    return pb_utils.InferenceResponse(
        [
            pb_utils.Tensor(name, value) if isinstance(value, np.ndarray) else value
            for name, value in tensors.items()
        ]
    )


def fail(error: ServingError) -> Any:
    """Build the response that refuses one request; raising instead would fail the whole batch."""
    code = getattr(pb_utils.TritonError, error.code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))


def answer_batch(batch: Batch, **tensors: np.ndarray) -> list[Any]:
    """Hand each request of `batch` its rows of `tensors`, or its error."""
    return [
        fail(rows) if isinstance(rows, ServingError) else answer(**{n: t[rows] for n, t in tensors.items()})
        for rows in batch.outcomes
    ]

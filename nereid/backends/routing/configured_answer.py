"""The configured answer of a route: a value of each output, for requests that no variant can answer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nereid.base.config.model_config import TensorSpec
from nereid.base.contract import ROUTE_OUTPUTS
from nereid.base.errors import InvalidConfig


def read_answer(values: Mapping[str, Any], outputs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Return the tensors of one image by output, each with the output's dims.

    Args:
        values: for each output, one value for all elements, or nested lists; `[]` is an empty variable dim.

    Raises:
        InvalidConfig: an output is missing or unknown, or a value has another shape or datatype.
    """
    expected = {output.name: output for output in outputs if output.name not in ROUTE_OUTPUTS}
    if values.keys() != expected.keys():
        raise InvalidConfig(f"answer: expected the outputs {', '.join(expected)}, got {', '.join(values)}")
    return {name: _tensor(values[name], output) for name, output in expected.items()}


def _tensor(value: Any, output: TensorSpec) -> np.ndarray:
    problem = InvalidConfig(
        f"answer '{output.name}': expected {output.type_and_dims}, got {json.dumps(value)[:100]}"
    )
    if value == [] and -1 in output.dims:
        value = np.empty([max(0, size) for size in output.dims])
    try:
        # Lists of unequal lengths have no shape.
        array = np.asarray(value)
    except ValueError:
        raise problem from None
    if not array.shape and -1 not in output.dims:
        array = np.broadcast_to(array, output.dims)
    is_shape = array.ndim == len(output.dims) and all(
        dim in (-1, size) for dim, size in zip(output.dims, array.shape, strict=True)
    )
    dtype = np.dtype(output.numpy_type)
    if not is_shape or not _fits(array, dtype):
        raise problem
    return _converted(array, dtype)


def _fits(array: np.ndarray, dtype: np.dtype) -> bool:
    if dtype.kind in "Ob":
        return not array.size or array.dtype.kind == ("U" if dtype.kind == "O" else "b")
    if array.dtype.kind not in "iuf":
        return False
    with np.errstate(over="ignore"):
        converted = _converted(array, dtype)
    return bool((np.isfinite(converted) if dtype.kind == "f" else converted == array).all())


def _converted(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "O":
        texts = [text.encode() for text in array.ravel()] if array.size else []
        return np.array(texts, object).reshape(array.shape)
    return array.astype(dtype)

"""Rules of Triton for the inputs and outputs of a config.

Source: triton-inference-server/core r24.10, model_config_utils.cc, ValidateIOShape and ValidateModelInput.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

IMAGE_FORMATS, IMAGE_RANK = ("FORMAT_NHWC", "FORMAT_NCHW"), 3
VARIABLE = -1


def tensor_problems(document: Mapping[str, Any], is_completed: bool) -> Iterator[str]:
    """Yield a text for each input or output that Triton refuses.

    Args:
        document: the model's config.
        is_completed: the backend adds missing datatypes and dims.
    """
    for side in ("input", "output"):
        for tensor in document.get(side, ()):
            name = f"{side} '{tensor.get('name', '')}'"
            if not tensor.get("name"):
                yield f"{side}: expected a name, got none"
            if not is_completed:
                for field in ("data_type", "dims"):
                    if not tensor.get(field):
                        yield f"{name}: expected {field}, got none"
            yield from (f"{name}: {problem}" for problem in _shape_problems(tensor))


def _shape_problems(tensor: Mapping[str, Any]) -> Iterator[str]:
    dims = [int(dim) for dim in tensor.get("dims", ())]
    if wrong := [dim for dim in dims if dim < 1 and dim != VARIABLE]:
        yield f"expected dims of 1 or more, or -1 for a variable size, got {wrong[0]}"
    if tensor.get("format") in IMAGE_FORMATS and dims and len(dims) != IMAGE_RANK:
        yield f"expected {IMAGE_RANK} dims for {tensor['format']}, got {len(dims)}"
    if "reshape" in tensor and dims:
        shape = [int(dim) for dim in tensor["reshape"].get("shape", ())]
        is_scalar = not shape and _elements(dims) == 1
        if _elements(shape) != _elements(dims) and not is_scalar:
            yield f"expected a reshape with as many elements as dims {dims}, got {shape}"


def _elements(shape: Sequence[int]) -> int:
    if not shape:
        return 0
    return VARIABLE if VARIABLE in shape else prod(shape)

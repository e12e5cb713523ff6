"""Model configuration parameters: strings, parsed into dataclasses or the way Triton's backends do."""

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

from nereid.base.config import instance_bounds
from nereid.base.errors import InvalidConfig

# Parameters read by Triton or `nereid serve`; every backend ignores them.
TRITON_PARAMETERS = frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS", "EXECUTION_ENV_PATH"})
SERVER_PARAMETERS = TRITON_PARAMETERS | instance_bounds.PARAMETERS
# Parameters read by `nereid.vision.inference.session_options`, and NVIDIA's that it can ignore; the booleans
# are `true` or `false`.
SESSION_PREFIX = "session."
ONNXRUNTIME_BOOLEANS = frozenset(
    {
        "enable_mem_arena",
        "enable_mem_pattern",
        "nereid.cuda_graphs",
        "nereid.halve_batch_if_out_of_memory",
        "nereid.shared_weights",
    }
)
ONNXRUNTIME_PARAMETERS = ONNXRUNTIME_BOOLEANS | {
    "arena_extend_strategy",
    "cudnn_conv_algo_search",
    "do_copy_in_default_stream",
    "execution_mode",
    "gpu_mem_limit",
    "inter_op_thread_count",
    "intra_op_thread_count",
    "memory.enable_memory_arena_shrinkage",
    "nereid.release_memory_every",
    "nereid.run_batch_size",
    "nereid.warm_batch_sizes",
}

BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}

Settings = TypeVar("Settings")


def parse_parameters(
    parameters: Mapping[str, str], schema: type[Settings], fixed: Mapping[str, Any]
) -> Settings:
    """Parse strings into the dataclass `schema`, using its field names and types.

    Args:
        schema: a field that is itself a dataclass is replaced by its own fields.
        fixed: values of the fields that are not parameters.

    Raises:
        ValueError: a parameter is unknown or missing, or its value has the wrong type.
    """
    known = {name: about for name, about in _leaves(schema).items() if name not in fixed}
    if unknown := sorted(parameters.keys() - known - SERVER_PARAMETERS):
        raise ValueError(f"unknown parameter '{unknown[0]}': expected one of {', '.join(sorted(known))}")
    required = [name for name, (_, is_required) in known.items() if is_required]
    if missing := [name for name in required if name not in parameters]:
        raise ValueError(f"parameter '{missing[0]}' is required")
    values = {name: _value(name, parameters[name], known[name][0]) for name in known if name in parameters}
    return typing.cast(Settings, _build(schema, {**values, **fixed}))


INTEGRAL = "integral number"


def parse_int(text: str, kind: str = INTEGRAL) -> int:
    """Read an integer as Triton's backends do, with C++ `std::stoi`: anything after the digits is ignored.

    Args:
        kind: the type's name in the error message.

    Raises:
        InvalidConfig: the text does not start with an integer, or the integer is too large.
    """
    match = re.match(r"\s*([+-]?[0-9]+)", text)
    if not match or (kind == INTEGRAL and abs(int(match[1])) >= 2**31):
        raise InvalidConfig(f"failed to convert '{text}' to {kind}")
    return int(match[1])


def parse_bool(text: str) -> bool:
    """Read `true`, `on`, `1`, `false`, `off` or `0` in any case, as Triton's backends do.

    Raises:
        InvalidConfig: the text is none of these words.
    """
    if text.lower() not in BOOLEANS:
        raise InvalidConfig(f"failed to convert '{text}' to boolean")
    return BOOLEANS[text.lower()]


def _value(name: str, text: str, hint: Any) -> Any:
    try:
        return _convert(text, hint)
    except (ValueError, KeyError):
        expected = hint.__name__
        if isinstance(hint, types.GenericAlias):
            expected = f"{typing.get_args(hint)[0].__name__}s separated by commas"
        raise ValueError(f"parameter '{name}': expected {expected}, got '{text}'") from None


def _leaves(schema: Any) -> dict[str, tuple[Any, bool]]:
    """Map each parameter name of a schema to its type and whether it is required."""
    hints = typing.get_type_hints(schema)
    leaves: dict[str, tuple[Any, bool]] = {}
    for field in fields(schema):
        hint = hints[field.name]
        leaves |= _leaves(hint) if is_dataclass(hint) else {field.name: (hint, field.default is MISSING)}
    return leaves


def _build(schema: Any, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(schema)
    nested = {name: _build(hint, values) for name, hint in hints.items() if is_dataclass(hint)}
    return schema(**nested, **{name: values[name] for name in hints if name in values and name not in nested})


def _convert(text: str, hint: Any) -> Any:
    if isinstance(hint, types.GenericAlias):
        return tuple(_convert(part.strip(), typing.get_args(hint)[0]) for part in text.split(","))
    if hint is bool:
        return BOOLEANS[text.lower()]
    return hint(text)

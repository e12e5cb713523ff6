"""Join requests into the inputs of one network run, and split its outputs among them.

Arrays are NumPy arrays, or CuPy arrays on the instance's device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereid.base.config.model_config import ModelConfig
from nereid.base.errors import InferenceFailed, InvalidConfig

Arrays = Mapping[str, Any]
# Datatypes that Triton allows for a batch_input.
# Source: core r24.10, model_config_utils.cc, ValidateBatchIO.
DTYPES = {"TYPE_INT32": np.int32, "TYPE_FP32": np.float32}


@dataclass(frozen=True, slots=True)
class BatchInput:
    """An input computed from the shapes of request input `source`; `kind` is Triton's without `BATCH_`."""

    name: str
    kind: str
    source: str
    dtype: type


@dataclass(frozen=True, slots=True)
class Batching:
    """Rules for joining a model's requests.

    Args:
        max_batch_size: if positive, the first dimension of every tensor is the batch; 0 for no batching.
        ragged: inputs whose shape may differ between requests; the network receives them flattened.
        batch_inputs: inputs computed from the batch itself.
        scattered: for each output split by element counts instead of rows, the input that is counted.
    """

    max_batch_size: int
    ragged: frozenset[str]
    batch_inputs: tuple[BatchInput, ...]
    scattered: Mapping[str, str]

    @classmethod
    def from_config(cls, config: ModelConfig) -> "Batching":
        """Read `batch_input`, `batch_output` and the ragged inputs.

        Raises:
            InvalidConfig: this backend does not support a kind or datatype.
        """
        scattered = {}
        for output in config.document.get("batch_output", ()):
            for name in output["target_name"]:
                (scattered[name],) = output["source_input"]
        return cls(
            max_batch_size=config.max_batch_size,
            ragged=frozenset(tensor.name for tensor in config.inputs if tensor.is_ragged),
            batch_inputs=tuple(
                _batch_input(config, entry, name)
                for entry in config.document.get("batch_input", ())
                for name in entry["target_name"]
            ),
            scattered=scattered,
        )

    @property
    def is_by_rows(self) -> bool:
        """Whether a batch can be split between any two rows, because each row is independent."""
        return not (self.ragged or self.batch_inputs or self.scattered)

    def rows(self, request: Arrays) -> int:
        """Return the batch size of one request; 1 for a model without a batch dimension."""
        return len(next(iter(request.values()))) if self.max_batch_size else 1

    def gather(self, requests: Sequence[Arrays]) -> Arrays:
        """Return the network's inputs for `requests`; the inputs of a single request are not copied."""
        if len(requests) == 1 and self.is_by_rows:
            return requests[0]
        inputs = {
            name: concatenate([self._flat(name, request[name]) for request in requests])
            for name in requests[0]
        }
        for batch_input in self.batch_inputs:
            shapes = [np.shape(request[batch_input.source]) for request in requests]
            inputs[batch_input.name] = BATCH_VALUES[batch_input.kind](shapes).astype(batch_input.dtype)
        return inputs

    def scatter(self, outputs: Arrays, requests: Sequence[Arrays]) -> list[dict[str, Any]]:
        """Return the part of `outputs` that belongs to each request.

        Raises:
            InferenceFailed: the length of an output does not match the batch.
        """
        if len(requests) == 1 and not self.scattered:
            return [dict(outputs)]
        parts: list[dict[str, Any]] = [{} for _ in requests]
        for name, array in outputs.items():
            if source := self.scattered.get(name):
                shapes = [np.shape(request[source]) for request in requests]
                pieces = _cut(name, array.reshape(-1), [int(np.prod(shape)) for shape in shapes])
                pieces = [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
            else:
                pieces = _cut(name, array, [self.rows(request) for request in requests])
            for part, piece in zip(parts, pieces, strict=True):
                part[name] = piece
        return parts

    def _flat(self, name: str, array: Any) -> Any:
        return array.reshape(-1) if name in self.ragged else array


def concatenate(arrays: Sequence[Any]) -> Any:
    """Join arrays along their first dimension, on their device; a single array is not copied."""
    if len(arrays) == 1:
        return arrays[0]
    if all(isinstance(array, np.ndarray) for array in arrays):
        return np.concatenate(arrays)
    import cupy

    return cupy.concatenate([cupy.asarray(array) for array in arrays])


def to_host(array: Any) -> np.ndarray:
    """Return an array on the host; an array already there is not copied."""
    return array if isinstance(array, np.ndarray) else array.get()


def _cut(name: str, array: Any, lengths: Sequence[int]) -> list[Any]:
    if array.ndim == 0 or len(array) != sum(lengths):
        raise InferenceFailed(f"output '{name}': expected {sum(lengths)} rows, got shape {list(array.shape)}")
    ends = np.cumsum(lengths)
    return [array[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def _batch_input(config: ModelConfig, entry: Mapping[str, Any], name: str) -> BatchInput:
    kind = entry.get("kind", "BATCH_ELEMENT_COUNT").removeprefix("BATCH_")
    datatype = entry.get("data_type", "")
    if kind not in BATCH_VALUES or datatype not in DTYPES:
        kinds = ", ".join(f"BATCH_{choice}" for choice in BATCH_VALUES)
        raise InvalidConfig(
            f"model '{config.name}', batch input '{name}': expected a kind of {kinds} and a datatype of "
            f"{', '.join(DTYPES)}, got BATCH_{kind} and {datatype}"
        )
    (source,) = entry["source_input"]
    return BatchInput(name, kind, source, DTYPES[datatype])


Shapes = Sequence[tuple[int, ...]]


def _element_counts(shapes: Shapes) -> np.ndarray:
    return np.array([np.prod(shape) for shape in shapes])


def _accumulated(shapes: Shapes) -> np.ndarray:
    return np.cumsum(_element_counts(shapes))


def _item_shapes(shapes: Shapes) -> np.ndarray:
    return np.array([shape[1:] for shape in shapes for _ in range(shape[0])])


# Compute a batch input from its source's shapes in all requests, batch dimension included.
# Source: Triton's model_config.proto, BatchInput.Kind.
BATCH_VALUES: dict[str, Callable[[Shapes], np.ndarray]] = {
    "ELEMENT_COUNT": _element_counts,
    "ACCUMULATED_ELEMENT_COUNT": _accumulated,
    "ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": lambda shapes: np.concatenate([[0], _accumulated(shapes)]),
    "MAX_ELEMENT_COUNT_AS_SHAPE": lambda shapes: np.zeros(_element_counts(shapes).max()),
    "ITEM_SHAPE": _item_shapes,
    "ITEM_SHAPE_FLATTEN": lambda shapes: _item_shapes(shapes).reshape(-1),
}

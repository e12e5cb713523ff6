"""Requests that a network runs at load, before the model is ready."""

from collections.abc import Iterator, Sequence

import numpy as np

from nereid.base.config.model_config import ModelConfig, TensorSpec
from nereid.base.serving_errors import InvalidConfig
from nereid.vision.inference.batching import Arrays
from nereid.vision.inference.run_sizes import WARM_BATCH_SIZES
from nereid.vision.inference.signature import DATATYPES, sequence_controls

DTYPES = {datatype: element for element, datatype in DATATYPES.items()} | {
    "TYPE_FP32": "float32",
    "TYPE_FP64": "float64",
    "TYPE_STRING": "object",
}


def requests(config: ModelConfig, sizes: Sequence[int]) -> Iterator[Arrays]:
    """Yield a request of zeros for each batch size.

    Raises:
        InvalidConfig: a dim of an input varies, so its shape is not known.
    """
    tensors = [each for each in (*config.inputs, *sequence_controls(config)) if not each.is_optional]
    for rows in sizes:
        yield {tensor.name: _zeros(config, tensor, rows) for tensor in tensors}


def _zeros(config: ModelConfig, tensor: TensorSpec, rows: int) -> np.ndarray:
    if any(dim < 0 for dim in tensor.network_dims):
        raise InvalidConfig(
            f"model '{config.name}', parameter {WARM_BATCH_SIZES}: expected inputs of fixed dims, got "
            f"'{tensor.name}' {list(tensor.network_dims)}; fix: set it to an empty text"
        )
    shape = (rows, *tensor.network_dims) if config.max_batch_size else tensor.network_dims
    dtype = np.dtype(DTYPES[tensor.datatype])
    return np.full(shape, b"", dtype) if dtype.kind == "O" else np.zeros(shape, dtype)

"""Warm-up of a model that was just loaded: one request with every batch size."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tritonclient.grpc
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from nereid.base.assets import COFFEE
from nereid.base.config.model_config import ModelConfig, TensorSpec
from nereid.base.contract import IMAGE, PROBE_HEADER
from nereid.base.errors import OperationFailed
from nereid.server.control import DIRECT, LOAD_S
from nereid.server.run_dir import ServerRecord

PROBE = {PROBE_HEADER: "1"}


def warm(record: ServerRecord, folder: Path, version: int) -> int:
    """Send a model one batch of every size; return the largest size.

    A model that takes one image per request gets as many requests at the same time instead.

    Raises:
        OperationFailed: a request fails, or an output has values that are not finite.
    """
    config = ModelConfig.from_file(folder, version)
    with tritonclient.grpc.InferenceServerClient(record.url("grpc"), channel_args=DIRECT) as client:
        for size in range(1, max(1, config.max_batch_size) + 1):
            if takes_one(config):
                with ThreadPoolExecutor(size) as pool:
                    list(pool.map(_infer, [client] * size, [config] * size, [1] * size))
            else:
                _infer(client, config, size)
    return max(1, config.max_batch_size)


def takes_one(config: ModelConfig) -> bool:
    """Return whether a request has one image: such a model returns as many rows as it finds."""
    texts = [each for each in config.inputs if each.name == IMAGE and each.datatype == "TYPE_STRING"]
    return bool(texts) and any(each.dims[:1] == (-1,) for each in config.outputs)


def _infer(client: tritonclient.grpc.InferenceServerClient, config: ModelConfig, size: int) -> None:
    tensors = [
        _tensor(spec, config.max_batch_size > 0, size) for spec in config.inputs if not spec.is_optional
    ]
    failure = f"warm-up of version {config.version} of '{config.name}' failed with a batch of {size}"
    try:
        result = client.infer(config.name, tensors, str(config.version), headers=PROBE, client_timeout=LOAD_S)
    except InferenceServerException as error:
        raise OperationFailed(f"{failure}: {error.message()}") from None
    for output in config.outputs:
        array = result.as_numpy(output.name)
        if array is not None and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise OperationFailed(
                f"{failure}: expected finite numbers in output '{output.name}', got NaN or infinity"
            )


def _tensor(spec: TensorSpec, is_batched: bool, size: int) -> tritonclient.grpc.InferInput:
    datatype = spec.datatype.removeprefix("TYPE_").replace("STRING", "BYTES")
    shape = [size] * is_batched + [max(1, dim) for dim in spec.dims]
    if datatype == "BYTES":
        array = np.full(shape, COFFEE.read_bytes(), np.object_)
    else:
        array = np.zeros(shape, triton_to_np_dtype(datatype))
    tensor = tritonclient.grpc.InferInput(spec.name, shape, datatype)
    tensor.set_data_from_numpy(array)
    return tensor

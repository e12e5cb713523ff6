"""Requests of one row for an examination, and the comparison of their outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from nereid.base.assets import SAMPLES
from nereid.base.config.model_config import ModelConfig, TensorSpec
from nereid.base.serving_errors import ServingError
from nereid.models.publish.examination.examine import ExaminationRequest, Rejected
from nereid.vision.inference.signature import DATATYPES, sequence_controls

Arrays = Mapping[str, Any]

# Largest difference of a row alone and in a batch, relative to the largest score: kernels may differ.
BATCH_TOLERANCE = 0.02

RANDOM_INPUTS, SEED = 4, 20260826
# The size of a free dim in random inputs: networks halve images five times.
FREE_DIM = 64


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a single row, its name for messages, and its encoded image if it has one.

    A line of text has the path of its image.
    """

    name: str
    inputs: Arrays
    encoded: bytes = b""
    image: str = ""


class Change(NamedTuple):
    """A difference from the current version, 0 for none, and its description."""

    difference: float
    text: str


def golden_samples(request: ExaminationRequest, config: ModelConfig) -> list[Sample]:
    """Return the golden images as the preprocess model converts them.

    Raises:
        Rejected: its output does not fit the network's input, or an image cannot be used.
        InvalidConfig: the preprocess model cannot be used.
    """
    from nereid.vision.imaging.pipeline import Pipeline

    assert request.preprocess is not None
    preprocess = ModelConfig.from_file(request.preprocess, request.preprocess_version)
    preprocess = replace(preprocess, parameters={**preprocess.parameters, "decode_threads": "1"})
    pipeline = Pipeline.from_config(preprocess, max_batch_size=1, instances=1)
    output, wanted = preprocess.outputs[0], config.inputs[0]
    if len(config.inputs) > 1 or (output.datatype, output.dims) != (wanted.datatype, wanted.dims):
        inputs = ", ".join(f"'{tensor.name}' {tensor.kind}" for tensor in config.inputs)
        raise Rejected(
            f"preprocessing '{preprocess.name}' returns {output.kind}, but the network's inputs are {inputs}"
        )
    samples = []
    for image in request.gates.images or SAMPLES:
        encoded = image.read_bytes()
        batch = pipeline.run([[encoded]])
        if isinstance(batch.outcomes[0], ServingError):
            raise Rejected(f"golden image '{image}': {batch.outcomes[0]}")
        shape = (*([1] if config.max_batch_size else []), *wanted.network_dims)
        samples.append(Sample(image.name, {wanted.name: batch.tensor.copy().reshape(shape)}, encoded))
    return samples


def random_samples(config: ModelConfig) -> list[Sample]:
    """Return random inputs that are the same in every examination."""
    rng = np.random.default_rng(SEED)
    tensors = [*(each for each in config.inputs if not each.is_optional), *sequence_controls(config)]
    return [
        Sample(f"random input {number}", {tensor.name: _random(tensor, config, rng) for tensor in tensors})
        for number in range(1, RANDOM_INPUTS + 1)
    ]


def _random(tensor: TensorSpec, config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    shape = [FREE_DIM if dim < 0 else dim for dim in tensor.network_dims]
    shape = [1, *shape] if config.max_batch_size else shape
    element = next(name for name, datatype in DATATYPES.items() if datatype == tensor.datatype)
    if element == "string":
        return np.full(shape, b"0", dtype=object)
    dtype = np.dtype({"float": "float32", "double": "float64"}.get(element, element))
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    # Integers may be indices of a table of any length; bytes are pixels.
    return rng.integers(0, 256 if element == "uint8" else 2, shape).astype(dtype)


def image_pair(samples: Sequence[Sample]) -> tuple[Sample, Sample]:
    """Return the first and the last sample if they have one shape, or the first one and its mirror image."""
    first, last = samples[0], samples[-1]
    (name,) = first.inputs
    if first is not last and first.inputs[name].shape == last.inputs[name].shape:
        return first, last
    mirrored = np.ascontiguousarray(first.inputs[name][..., ::-1])
    return first, replace(first, inputs={name: mirrored})


def is_close(alone: Sequence[Arrays], together: Sequence[Arrays]) -> bool:
    """Return whether all numbers are equal, apart from the rounding of other kernels."""
    return all(
        _is_close([each[name] for each in alone], [each[name] for each in together]) for name in alone[0]
    )


def _is_close(alone: Sequence[np.ndarray], together: Sequence[np.ndarray]) -> bool:
    if len({each.shape for each in (*alone, *together)}) != 1:
        return False
    expected, found = np.concatenate(alone), np.concatenate(together)
    if not expected.size:
        return True
    limit = BATCH_TOLERANCE * (np.abs(expected).max() or 1.0)
    return bool(np.abs(found - expected).max() <= limit)

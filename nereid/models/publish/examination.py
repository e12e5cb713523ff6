"""Examination of a network in a separate process, and what a task must provide for it.

A broken network can crash its process or use all memory. In a separate process, `examiner`, it affects
neither the server nor the command.
"""

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from nereid.base.assets import SAMPLES
from nereid.base.config.model_config import ModelConfig, TensorSpec, read_pbtxt
from nereid.base.errors import OperationFailed, ServingError
from nereid.base.task import Task
from nereid.base.task_registry import DEFAULT_TASK, TASK_BY_BACKEND, TASKS, task_of
from nereid.models.publish import isolated_child
from nereid.models.publish.importing.graph_edits import Activation
from nereid.repository.onnx_file import OnnxFile
from nereid.vision.inference.signature import sequence_controls

EXAMINER = "nereid.models.publish.examiner"
# An endless loop in a network must not block the publisher for long.
TIMEOUT_S, BYTES_PER_S = 60.0, 10 * 2**20
# Largest difference between a row alone and in a batch, relative to the largest score; kernels may differ.
BATCH_TOLERANCE = 0.02
RANDOM_INPUTS, SEED = 4, 20260826
# The size of a free dim in random inputs, because networks halve images five times.
FREE_DIM = 64
Arrays = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExaminationLimits:
    """Limits for a new version, compared with the current one.

    Args:
        images: the images that both versions classify; () for the task's own.
        tolerance: maximum difference of outputs, relative to the current version's largest |output|.
        is_change_accepted: whether a larger difference is only noted.
        max_slowdown: maximum ratio of the median latencies.
        max_memory_ratio: maximum ratio of the memory sizes.
        against: version to compare with; 0 for the version of a route's default variant.
    """

    images: tuple[Path, ...] = ()
    tolerance: float = 0.05
    is_change_accepted: bool = False
    max_slowdown: float = 1.5
    max_memory_ratio: float = 1.5
    against: int = 0


@dataclass(frozen=True, slots=True)
class ExaminationRequest:
    """The network to examine, and the limits for it.

    Args:
        model: its name, for messages.
        version_folder: a version folder, with or without a number as its name.
        document: the model's config, with protobuf field names.
        current: the version folder to compare with; None for a first version.
        labels: label file whose lines are counted against the classes of the output.
        limits: the limits, and the encoded golden images.
        pinned: folder of the pinned model that runs the network; None without one.
        preprocess: folder of the model that converts images to inputs; None for random inputs.
        preprocess_version: the version of that model.
        after: folder of the model that computes the pinned model's outputs; None without one.
        after_version: the version of that model.
        is_first_run: whether the network is only run once, to see what it returns.
        described: the task in the description of the current version; empty for none.
    """

    model: str
    version_folder: Path
    document: Mapping[str, Any]
    current: Path | None = None
    labels: Path | None = None
    limits: ExaminationLimits = ExaminationLimits()
    pinned: Path | None = None
    preprocess: Path | None = None
    preprocess_version: int = 0
    after: Path | None = None
    after_version: int = 0
    is_first_run: bool = False
    described: str = ""

    @property
    def task(self) -> Task:
        """The task as described, or by a backend, or by the pinned model's outputs; else the default."""
        described = next((task for task in TASKS if task.name == self.described), DEFAULT_TASK)
        if described is not DEFAULT_TASK:
            return described
        configs = [read_pbtxt(folder / "config.pbtxt") for folder in (self.after, self.pinned) if folder]
        for config in configs:
            if task := TASK_BY_BACKEND.get(config.get("backend", "")):
                return task
        outputs = configs[-1].get("output", ()) if configs else ()
        return task_of([output["name"] for output in outputs]) or DEFAULT_TASK

    def to_json(self) -> bytes:
        """Return the request as one line of JSON."""
        return msgspec.json.encode(self, enc_hook=str)

    @classmethod
    def from_json(cls, text: str) -> "ExaminationRequest":
        """Parse the result of `to_json`."""
        return msgspec.json.decode(text, type=cls, dec_hook=lambda path, name: path(name))


@dataclass(frozen=True, slots=True)
class Measurements:
    """Measurements of an accepted network; ratios are to the current version, None for a first version.

    Args:
        size_bytes: the network and its external data.
        latency_ms: median of one row on one thread.
        difference: the largest over all inputs, relative to the current version's largest |output|.
    """

    sha256: str
    size_bytes: int
    opset: int
    ir_version: int
    latency_ms: float
    slowdown: float | None
    memory_bytes: int
    memory_ratio: float | None
    difference: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FirstRun:
    """The results of a first run.

    Args:
        can_batch: whether the rows of a batch have the same outputs as alone.
        activation: the function that turns scores into probabilities; `none` if they already are.
        meaning: what the scores mean, in words.
        results: what was found in each image, as JSON; `nereid add --json` prints it.
        claimed_by: task whose networks return such outputs, if the default task examines them; else empty.
    """

    can_batch: bool
    activation: Activation = "none"
    meaning: str = ""
    results: tuple[tuple[Any, ...], ...] = ()
    claimed_by: str = ""


@dataclass(frozen=True, slots=True)
class NetworkInput:
    """One request of a single row, its name for messages, and its encoded image if it has one.

    A part of an image, such as a line of text, has the path of its image.
    """

    name: str
    inputs: Arrays
    encoded: bytes = b""
    image: str = ""


Samples = Sequence[NetworkInput]
# The outputs by name, for each sample.
Outputs = Sequence[Arrays]


class OutputChange(NamedTuple):
    """A difference from the current version, 0 for none, and its description."""

    difference: float
    text: str


class Examination(ABC):
    """What the outputs of a network mean: the entry point `examination` of a task is a subclass.

    An instance is created in the process of the examiner, which may raise InvalidConfig.
    """

    def __init__(self, request: ExaminationRequest) -> None:
        self._request = request

    @staticmethod
    @abstractmethod
    def fits(request: ExaminationRequest) -> bool:
        """Return whether the request has the models that the task needs; else the default task is used."""

    def samples(self, config: ModelConfig) -> list[NetworkInput]:
        """Return the inputs on which the versions are compared: the golden images, converted.

        Raises:
            Rejected: there are none, an image cannot be used, or the network's input does not fit.
            InvalidConfig: the preprocess model cannot be used.
        """
        from nereid.vision.imaging.pipeline import Pipeline

        assert self._request.preprocess is not None
        preprocess = ModelConfig.from_file(self._request.preprocess, self._request.preprocess_version)
        preprocess = replace(preprocess, parameters={**preprocess.parameters, "decode_threads": "1"})
        pipeline = Pipeline.from_config(preprocess, max_batch_size=1, instances=1)
        output, network_input = preprocess.outputs[0], config.inputs[0]
        if len(config.inputs) > 1 or (output.datatype, output.dims) != (
            network_input.datatype,
            network_input.dims,
        ):
            inputs = ", ".join(f"'{tensor.name}' {tensor.type_and_dims}" for tensor in config.inputs)
            raise Rejected(
                f"preprocessing '{preprocess.name}' returns {output.type_and_dims}, "
                f"but the network's inputs are {inputs}"
            )
        samples, images = [], self._request.limits.images or SAMPLES
        for title, image in zip(titles(images), images, strict=True):
            encoded = image.read_bytes()
            batch = pipeline.run([[encoded]])
            if isinstance(batch.outcomes[0], ServingError):
                raise Rejected(f"golden image '{image}': {batch.outcomes[0]}")
            shape = (*([1] if config.max_batch_size else []), *network_input.network_dims)
            tensor = batch.tensor.copy().reshape(shape)
            samples.append(NetworkInput(title, {network_input.name: tensor}, encoded))
        return samples

    def pair(self, samples: Samples) -> tuple[NetworkInput, NetworkInput]:
        """Return two different inputs of one shape, to try a batch of two.

        These are the first and last sample or, if their shapes differ, the first one and its mirror image.
        """
        first, last = samples[0], samples[-1]
        (name,) = first.inputs
        if first is not last and first.inputs[name].shape == last.inputs[name].shape:
            return first, last
        mirrored = np.ascontiguousarray(first.inputs[name][..., ::-1])
        return first, replace(first, inputs={name: mirrored})

    def is_same(self, alone: Outputs, together: Outputs) -> bool:
        """Return whether rows have the same outputs in a batch as alone, apart from rounding by kernels."""
        for name in alone[0]:
            before, after = ([row[name] for row in rows] for rows in (alone, together))
            if len({array.shape for array in (*before, *after)}) != 1:
                return False
            expected, actual = np.concatenate(before), np.concatenate(after)
            limit = BATCH_TOLERANCE * (np.abs(expected).max(initial=0) or 1.0)
            if np.abs(actual - expected).max(initial=0) > limit:
                return False
        return True

    @abstractmethod
    def first_run(self, file: OnnxFile, samples: Samples, outputs: Outputs, can_batch: bool) -> FirstRun:
        """Return what a new network returns; Rejected if the outputs cannot be the task's."""

    @abstractmethod
    def notes(self, config: ModelConfig, samples: Samples, outputs: Outputs) -> Iterator[str]:
        """Yield what the user should know about the outputs."""

    @abstractmethod
    def changes(self, samples: Samples, before: Outputs, after: Outputs) -> Iterator[OutputChange]:
        """Yield the differences between the outputs of two versions."""


class Rejected(OperationFailed):
    """The network must not be served; the message is the reason on one line."""


class ExaminationFailed(OperationFailed):
    """The examination failed for a reason outside the network."""


def examine(request: ExaminationRequest, progress: Callable[[str], None] = lambda line: None) -> Measurements:
    """Examine a network in a separate process, which ends with this one, or after 60 s and 1 s per 10 MiB.

    Args:
        request: the network and its limits.
        progress: receives a line before each step.

    Raises:
        Rejected: the network must not be served, crashed the process, or exceeded the time limit.
        ExaminationFailed: the examination itself failed, for example because the `onnx` package is missing.
    """
    return msgspec.convert(_run(request, progress), Measurements)


def make_first_run(request: ExaminationRequest, progress: Callable[[str], None]) -> FirstRun:
    """Run a network for the first time; arguments and errors as for `examine`."""
    return msgspec.convert(_run(replace(request, is_first_run=True), progress), FirstRun)


def _run(request: ExaminationRequest, progress: Callable[[str], None]) -> Any:
    files = [path for path in request.version_folder.rglob("*") if path.is_file()]
    timeout_s = TIMEOUT_S + sum(path.stat().st_size for path in files) / BYTES_PER_S
    try:
        kind, content = isolated_child.run(EXAMINER, request.to_json().decode(), timeout_s, progress)
    except isolated_child.NoResult as end:
        if end.is_late:
            raise Rejected(
                f"the examination of '{request.model}' was stopped: expected a result within "
                f"{timeout_s:.3g} s, last step: {end.last}"
            ) from None
        raise _crash(request.model, end) from None
    if kind == "rejected":
        raise Rejected(content)
    if kind == "failed":
        raise ExaminationFailed(content)
    return content


def _crash(model: str, end: isolated_child.NoResult) -> OperationFailed:
    text = f"last step: {end.last}" + (f"; its last output: {end.output}" if end.output else "")
    if end.status < 0:
        name = signal.Signals(-end.status).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return Rejected(f"the examination of '{model}' crashed with {name}{hint}, {text}")
    return ExaminationFailed(f"the examination of '{model}' failed with exit code {end.status}, {text}")


def titles(images: Sequence[Path]) -> list[str]:
    """Return the names of files, or their paths as given if two names are equal."""
    names = [image.name for image in images]
    return [name if names.count(name) == 1 else str(image) for name, image in zip(names, images, strict=True)]


def random_samples(config: ModelConfig) -> list[NetworkInput]:
    """Return random inputs that are the same in every examination."""
    rng = np.random.default_rng(SEED)
    tensors = [*(tensor for tensor in config.inputs if not tensor.is_optional), *sequence_controls(config)]
    return [
        NetworkInput(
            f"random input {number}", {tensor.name: _random(tensor, config, rng) for tensor in tensors}
        )
        for number in range(1, RANDOM_INPUTS + 1)
    ]


def _random(tensor: TensorSpec, config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    shape = [FREE_DIM if dim < 0 else dim for dim in tensor.network_dims]
    shape = [1, *shape] if config.max_batch_size else shape
    dtype = np.dtype(tensor.numpy_type)
    if dtype.kind == "O":
        return np.full(shape, b"0", dtype)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    # Integers may be indices into a table of any length; bytes are pixels.
    return rng.integers(0, 256 if dtype == np.uint8 else 2, shape).astype(dtype)

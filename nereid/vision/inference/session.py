"""ONNX Runtime sessions, built from a model's config.pbtxt as in NVIDIA's backend."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnxruntime

from nereid.base.config.model_config import ModelConfig, TensorSpec
from nereid.base.errors import (
    DeviceFailed,
    InferenceFailed,
    InvalidConfig,
    InvalidRequest,
    OutOfMemory,
    RuntimeFailed,
    ServingError,
    from_exception,
)
from nereid.vision.inference import io_binding as gpu
from nereid.vision.inference import network_file
from nereid.vision.inference.batching import Arrays, Batching, concatenate
from nereid.vision.inference.run_failures import run_failure
from nereid.vision.inference.run_sizes import RUN_BATCH_SIZE, WARM_BATCH_SIZES
from nereid.vision.inference.session_options import (
    CUDA,
    CUDA_GRAPHS,
    HALVE_BATCHES,
    NO_CUDA_GRAPHS,
    USER_STREAM,
    BackendSettings,
    SessionSettings,
    Sharing,
    on_available_provider,
    session_settings,
    uses_cuda_graphs,
)
from nereid.vision.inference.signature import Signature, sequence_controls, validate


@dataclass(frozen=True, slots=True)
class SessionEvents:
    """Callbacks of a session; by default they do nothing.

    Args:
        on_run: called after each run, with its duration in seconds and its rows.
        on_batch_halved: called before a batch that did not fit into memory is run in two halves.
        on_warmup: called after each warm-up at load, with its duration in seconds.
        on_device_failed: called once, with the error text, when the session's device has failed.
    """

    on_run: Callable[[float, int], None] = lambda seconds, rows: None
    on_batch_halved: Callable[[], None] = lambda: None
    on_warmup: Callable[[float], None] = lambda seconds: None
    on_device_failed: Callable[[str], None] = lambda reason: None


def zero_requests(config: ModelConfig, sizes: Sequence[int]) -> Iterator[Arrays]:
    """Yield a request of zeros for each batch size.

    Raises:
        InvalidConfig: an input has a variable dim, so its shape is unknown.
    """
    tensors = [tensor for tensor in (*config.inputs, *sequence_controls(config)) if not tensor.is_optional]
    for rows in sizes:
        yield {tensor.name: _zeros(config, tensor, rows) for tensor in tensors}


def _zeros(config: ModelConfig, tensor: TensorSpec, rows: int) -> np.ndarray:
    if any(dim < 0 for dim in tensor.network_dims):
        raise InvalidConfig(
            f"model '{config.name}', parameter {WARM_BATCH_SIZES}: expected inputs of fixed dims, got "
            f"'{tensor.name}' {list(tensor.network_dims)}; fix: set it to an empty text"
        )
    shape = (rows, *tensor.network_dims) if config.max_batch_size else tensor.network_dims
    dtype = np.dtype(tensor.numpy_type)
    return np.full(shape, b"", dtype) if dtype.kind == "O" else np.zeros(shape, dtype)


RunOutcome = dict[str, Any] | ServingError
Feed = Callable[[onnxruntime.InferenceSession, Arrays, Sequence[str], onnxruntime.RunOptions], list[Any]]
Run = Callable[[Arrays, Sequence[str], int], list[Any]]


class Session:
    """A network that is ready to run, with the input and output names of its ONNX file.

    `settings.run_batch_size` limits the rows of one run: on a CPU, the activations of a large batch exceed
    the cache, so each image costs more than in a small batch. After `DeviceFailed`, every run fails with the
    same error.

    Attributes:
        is_on_gpu: whether outputs stay on the GPU; inputs there are copied only for CUDA graphs.
        is_on_stream: whether runs use the caller's stream; `bind` then returns them.
        device_failure: why every run fails, or empty.
        note: what the instance runs without (shared weights or CUDA graphs) and why, or empty.
    """

    def __init__(self, config: ModelConfig, settings: SessionSettings, events: SessionEvents) -> None:
        self._session = network_file.open_configured(config, settings)
        self._name = config.name
        self._batching = Batching.from_config(config)
        self._output_dims = {tensor.name: tensor.network_dims for tensor in config.outputs}
        self._run_options, self._releasing = settings.options_of_runs(), settings.releasing
        self._run_batch_size = settings.run_batch_size or sys.maxsize
        self._halves_batches = settings.halves_batches
        self._events = events
        self.device_failure = ""
        self._threads = settings.threads.intra_op
        self.note = ""
        self.signature = Signature.of(self._session)
        validate(config, self.signature)
        self.provider = self._session.get_providers()[0]
        tensors = {**self.signature.inputs, **self.signature.initializers}
        self._texts = frozenset(n for n, tensor in tensors.items() if tensor.datatype == "TYPE_STRING")
        self._scalars = frozenset(n for n, tensor in tensors.items() if not tensor.shape)
        # Strings are on the host, because IoBinding does not support them.
        datatypes = {tensor.datatype for tensor in (*tensors.values(), *self.signature.outputs.values())}
        self.is_on_gpu = CUDA in dict(settings.providers) and "TYPE_STRING" not in datatypes
        self._device_id, self._sizes = config.device_id, settings.warm_batch_sizes
        self.is_on_stream = self.is_on_gpu and USER_STREAM in dict(settings.providers)[CUDA]
        self._run_feed: Feed = _run_on_host
        if self.is_on_gpu:
            gpu.use(config.device_id)
            self._run_feed = partial(gpu.run, device_id=config.device_id)
            if uses_cuda_graphs(settings.providers):
                has_rows = self._batching.is_by_rows and config.max_batch_size > 0
                sizes = settings.warm_batch_sizes if has_rows else ()
                self._run_feed = gpu.cuda_graph_runs(config.device_id, sizes)

    @classmethod
    def from_config(
        cls,
        config: ModelConfig,
        backend: BackendSettings | None = None,
        instances: int | None = None,
        events: SessionEvents | None = None,
        stream: int = 0,
    ) -> "Session":
        """Open the ONNX file of `config`'s version; see `session_settings` for `backend` and `instances`.

        Args:
            stream: address of the CUDA stream for all runs; `bind` then replaces the warm-up. A network that
                does not support CUDA graphs ignores it.

        Raises:
            InvalidConfig: the file is missing, cannot be loaded, or does not fit the config.
        """
        backend = backend or BackendSettings()
        config = on_available_provider(config, onnxruntime.get_available_providers(), backend.profile)
        settings, events = session_settings(config, backend, instances, stream), events or SessionEvents()
        try:
            session = cls(config, settings, events)
        except InvalidConfig as error:
            if settings.sharing is Sharing.TRIED:
                backend, note = replace(backend, shares_weights=False), "each with its own weights"
            elif NO_CUDA_GRAPHS in str(error):
                config, note = config.with_parameters({CUDA_GRAPHS: "false"}), "without CUDA graphs"
            else:
                raise
            # Drop the stream: without graphs, runs of the exact number of rows are faster than padded ones.
            settings = session_settings(config, backend, instances)
            session = cls(config, settings, events)
            session.note = f", {note}: {error}"
        if not session.is_on_stream:
            session.warm_up(zero_requests(config, settings.warm_batch_sizes))
        return session

    def __str__(self) -> str:
        return (
            f"ONNX Runtime {onnxruntime.__version__}, {self.provider}, "
            f"{self._threads or 'default'} thread(s) per instance{self.note}"
        )

    def warm_up(self, requests: Iterable[Arrays]) -> None:
        """Run the network once per request, so that no client waits for the first run of a batch size.

        Raises:
            InvalidConfig: a run fails.
        """
        for request in requests:
            start = time.perf_counter()
            try:
                self._feed(self._batching.gather([request]), [*self._output_dims], next(self._run_options))
            except ServingError as error:
                rows = self._batching.rows(request)
                raise InvalidConfig(
                    f"model '{self._name}', run of {rows} row(s) of zeros at load: {error}; "
                    f"fix: other sizes in {WARM_BATCH_SIZES}, or an empty text"
                ) from None
            self._events.on_warmup(time.perf_counter() - start)

    def bind(self, name: str, tensors: Sequence[Any], outputs: Sequence[str]) -> gpu.BoundRuns:
        """Return runs over fixed memory on the session's stream; see `BoundRuns` for the arguments.

        Raises:
            InvalidConfig: a run fails.
        """
        largest = len(tensors[0])
        sizes = [*(size for size in self._sizes if size < largest), largest]
        start = time.perf_counter()
        try:
            bound = gpu.BoundRuns(self._session, name, tensors, outputs, sizes, self._device_id)
        except Exception as error:  # ONNX Runtime's own exceptions share no base class
            failure = error if isinstance(error, ServingError) else run_failure(error)
            raise InvalidConfig(f"model '{self._name}', run of zeros at load: {failure}") from None
        self._events.on_warmup(time.perf_counter() - start)
        return bound

    def run(self, inputs: Arrays, outputs: Sequence[str], rows: int | None = None) -> list[Any]:
        """Run the network on one batch, and return one array per name in `outputs`.

        Args:
            rows: batch size if it is not the inputs' first dimension, as for ragged inputs.

        Raises:
            InvalidRequest: a string is not UTF-8.
            InferenceFailed: ONNX Runtime rejected the inputs or failed.
            DeviceFailed: the device failed, now or in an earlier run.
        """
        rows = self._batching.rows(inputs) if rows is None else rows
        if not self._batching.is_by_rows:
            return self._run(inputs, outputs, rows)
        if rows <= self._run_batch_size:
            return self._run_or_halve(inputs, outputs, rows)
        return self._run_parts(self._run_or_halve, inputs, outputs, rows, self._run_batch_size)

    def fail(self, reason: str) -> None:
        """Make every run fail from now on, as after a device failure; only the first call is reported."""
        if not self.device_failure:
            self.device_failure = reason
            self._events.on_device_failed(reason)

    def run_requests(self, requests: Sequence[Arrays], outputs: Sequence[Sequence[str]]) -> list[RunOutcome]:
        """Run several requests, joined into groups of at most `run_batch_size` rows.

        If a group fails, its requests are run one by one, so that only the request at fault fails.

        Args:
            requests: each request's inputs by name, [N, ...]; N may differ between requests.
            outputs: the names of the outputs that each request wants.

        Returns:
            Each request's outputs by name, or its error.
        """
        if len(requests) == 1:
            return [self._run_alone(requests[0], outputs[0])]
        total, allowed = sum(map(self._batching.rows, requests)), self._batching.max_batch_size
        if allowed and total > allowed:
            error = RuntimeFailed(f"batch size {total} for '{self._name}', max allowed is {allowed}")
            return [error] * len(requests)
        outcomes: list[RunOutcome] = []
        for group in self._groups(requests):
            outcomes += self._run_joined(group, outputs[len(outcomes) :][: len(group)])
        return outcomes

    def _groups(self, requests: Sequence[Arrays]) -> Iterator[list[Arrays]]:
        group: list[Arrays] = []
        rows = 0
        for request in requests:
            more = self._batching.rows(request)
            if group and (not self._batching.max_batch_size or rows + more > self._run_batch_size):
                yield group
                group, rows = [], 0
            group.append(request)
            rows += more
        if group:
            yield group

    def _run_joined(self, group: list[Arrays], output_names: Sequence[Sequence[str]]) -> list[RunOutcome]:
        names = sorted(set().union(*output_names))
        try:
            parts = self._run_group(group, names)
        except Exception:  # a bad request must not fail the others
            return [
                self._run_alone(request, outputs)
                for request, outputs in zip(group, output_names, strict=True)
            ]
        return [
            {name: part[name] for name in outputs} for part, outputs in zip(parts, output_names, strict=True)
        ]

    def _run_alone(self, request: Arrays, outputs: Sequence[str]) -> RunOutcome:
        try:
            return self._run_group([request], [*outputs])[0]
        except Exception as error:  # an exception that leaves `execute` fails the whole batch
            return from_exception(error)

    def _run_group(self, group: list[Arrays], names: list[str]) -> list[dict[str, Any]]:
        if not names:  # without names, ONNX Runtime would return all outputs
            return [{} for _ in group]
        inputs, rows = self._batching.gather(group), sum(map(self._batching.rows, group))
        outputs = dict(zip(names, self.run(inputs, names, rows), strict=True))
        return self._batching.scatter(outputs, group)

    def _run_or_halve(self, inputs: Arrays, outputs: Sequence[str], rows: int) -> list[Any]:
        try:
            return self._run(inputs, outputs, rows)
        except OutOfMemory:
            if not self._halves_batches or rows < 2:
                raise
        self._events.on_batch_halved()
        self._release_memory({name: array[:1] for name, array in inputs.items()}, outputs)
        return self._run_parts(self._run, inputs, outputs, rows, (rows + 1) // 2)

    def _run_parts(
        self, run: Run, inputs: Arrays, outputs: Sequence[str], rows: int, part_rows: int
    ) -> list[Any]:
        parts = []
        for start in range(0, rows, part_rows):
            part = {name: array[start : start + part_rows] for name, array in inputs.items()}
            expected = self._batching.rows(part)
            parts.append(run(part, outputs, expected))
            if any(len(result) != expected for result in parts[-1]):
                raise InferenceFailed(
                    f"{RUN_BATCH_SIZE}, {HALVE_BATCHES}: expected one row of output per row of input"
                )
        return [concatenate(results) for results in zip(*parts, strict=True)]

    def _release_memory(self, row: Arrays, outputs: Sequence[str]) -> None:
        """Release the arena's free memory: ONNX Runtime does so at the end of a run, even of a failed one."""
        if self.is_on_gpu:
            gpu.release_memory()
        if self._releasing:
            with contextlib.suppress(InferenceFailed):
                self._feed(row, outputs, self._releasing)

    def _run(self, inputs: Arrays, outputs: Sequence[str], rows: int) -> list[Any]:
        start = time.perf_counter()
        results = self._feed(inputs, outputs, next(self._run_options))
        self._events.on_run(time.perf_counter() - start, rows)
        # Triton has no scalars, so they are returned with the config's dims.
        return [
            result if result.ndim else result.reshape(self._output_dims[name])
            for name, result in zip(outputs, results, strict=True)
        ]

    def _feed(self, inputs: Arrays, outputs: Sequence[str], options: onnxruntime.RunOptions) -> list[Any]:
        if self.device_failure:
            raise DeviceFailed(self.device_failure)
        feed = {name: self._converted(name, array) for name, array in inputs.items()}
        try:
            return self._run_feed(self._session, feed, outputs, options)
        except ServingError:
            raise
        except Exception as error:  # ONNX Runtime's own exceptions share no base class
            failure = run_failure(error)
        if isinstance(failure, DeviceFailed):
            self.fail(failure.reason)
        raise failure

    def _converted(self, name: str, array: Any) -> Any:
        if name in self._scalars:
            array = array.reshape(())
        return _decode_texts(name, array) if name in self._texts else array


def _run_on_host(
    session: onnxruntime.InferenceSession,
    inputs: Arrays,
    outputs: Sequence[str],
    options: onnxruntime.RunOptions,
) -> list[Any]:
    return list(session.run(outputs, inputs, options))


def _decode_texts(name: str, array: np.ndarray) -> np.ndarray:
    """Decode bytes[...] to str[...] for ONNX Runtime's Python API; NULs are kept."""
    try:
        texts = [text.decode() for text in array.ravel()]
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input '{name}': expected UTF-8: {error}") from None
    return np.array(texts, dtype=object).reshape(array.shape)

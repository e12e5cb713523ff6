"""The device side of a pipeline: three streams, ordered by events, without waiting for a stream or device.

Stream `decoding` belongs to the preprocessor: it decodes, and its kernel writes a slot's tensor. Stream
`computing` runs the network on that tensor, and `copying` copies its outputs to pinned memory.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from nereid.backends.triton.model_trace import BatchTrace
from nereid.backends.triton.post_processing import PostProcessing, PostProcessingOutcome, RequestImages
from nereid.base.config.model_config import ModelConfig
from nereid.base.config.parameters import parse_bool
from nereid.base.errors import InvalidConfig, ServingError, from_exception
from nereid.vision.imaging.image_times import ImageTimes
from nereid.vision.imaging.pipeline import Batch, by_request, images_of
from nereid.vision.inference.run_sizes import WARM_BATCH_SIZES, max_run_rows
from nereid.vision.inference.session import Session
from nereid.vision.inference.session_options import ARENA_SHRINKAGE, CUDA_GRAPHS


class StreamPreprocessor(Protocol):
    """A decoder of batches into slots: `GpuPreprocessor`."""

    stream: Any
    times: Sequence[ImageTimes]

    def enqueue(self, images: Sequence[bytes], slot: int, decoded: Any) -> list[ServingError | None]:
        """Enqueue a batch on `stream`, and record the event `decoded` after its decoding."""

    def release(self) -> None:
        """Release what the device has read, when nothing is enqueued any more."""


class StreamNetwork(Protocol):
    """A network with buffers for each slot: `BoundRuns`."""

    def enqueue(self, slot: int, rows: int) -> None:
        """Enqueue a run on the network's stream."""

    def fetch(self, slot: int, rows: int, stream: Any) -> Mapping[str, np.ndarray]:
        """Enqueue the copies of the outputs to the host, and return the arrays that will hold them."""


class StageTimestamps(NamedTuple):
    """Ends of a batch's stages, and the start of its run, in ns since the Unix epoch, from CUDA events."""

    decoded_ns: int
    prepared_ns: int
    start_ns: int
    computed_ns: int


class DeviceStreams:
    """Streams and events of a pipeline; all methods but `wait` are called by one thread.

    Args:
        cuda: `cupy.cuda`, or a fake in tests.
        computing: stream of the network.
    """

    def __init__(
        self, cuda: Any, preprocessor: StreamPreprocessor, network: StreamNetwork, computing: Any, slots: int
    ) -> None:
        self._preprocessor, self._network = preprocessor, network
        self._computing, self._copying = computing, cuda.Stream(non_blocking=True)
        self._elapsed_ms = cuda.get_elapsed_time
        self._decoded, self._prepared, self._started, self._computed, self._copied = (
            [cuda.Event() for _ in range(slots)] for _ in range(5)
        )
        self._outputs: list[Mapping[str, np.ndarray]] = [{} for _ in range(slots)]

    def decode(
        self, slot: int, images: Sequence[bytes]
    ) -> tuple[list[ServingError | None], Sequence[ImageTimes]]:
        """Enqueue decoding and kernel; return the error and the times of each image."""
        # A batch without good images was answered without waiting for its kernel, which reads the table.
        self._prepared[slot].synchronize()
        try:
            errors = self._preprocessor.enqueue(images, slot, self._decoded[slot])
        except Exception:  # the next batch must not reuse what the device may still read
            with contextlib.suppress(Exception):
                self._preprocessor.stream.synchronize()
            raise
        self._prepared[slot].record(self._preprocessor.stream)
        return errors, self._preprocessor.times

    def compute(self, slot: int, rows: int) -> None:
        """Enqueue the network for the first rows of a slot, and the copies of its outputs."""
        self._computing.wait_event(self._prepared[slot])
        self._started[slot].record(self._computing)
        self._network.enqueue(slot, rows)
        self._computed[slot].record(self._computing)
        self._copying.wait_event(self._computed[slot])
        self._outputs[slot] = self._network.fetch(slot, rows, self._copying)
        self._copied[slot].record(self._copying)

    def wait(self, slot: int) -> tuple[Mapping[str, np.ndarray], StageTimestamps]:
        """Wait for the outputs of a slot; they are valid until the slot's next `compute`."""
        self._copied[slot].synchronize()
        now_ns = time.time_ns()
        events = self._decoded[slot], self._prepared[slot], self._started[slot], self._computed[slot]
        return self._outputs[slot], StageTimestamps(
            *(now_ns - round(self._elapsed_ms(event, self._copied[slot]) * 1e6) for event in events)
        )

    def release(self) -> None:
        """Release what the device has read, when no batch is left."""
        self._preprocessor.release()


# Parameters for runs that do not use fixed memory, or do not cover all sizes.
NEED_OWN_RUNS = frozenset({ARENA_SHRINKAGE, WARM_BATCH_SIZES})


def can_bind(
    config: ModelConfig, preprocess: ModelConfig, network: ModelConfig, needed_outputs: Sequence[str]
) -> bool:
    """Return whether a network runs in fixed memory: on a GPU, with CUDA graphs and fixed outputs.

    Args:
        config, preprocess: of the fused model, and of its preprocessing.
        needed_outputs: names of the network outputs that it needs.
    """
    accelerators = network.document.get("optimization", {}).get("execution_accelerators", {})
    names = {accelerator["name"] for accelerator in accelerators.get("gpu_execution_accelerator", ())}
    tensors = [tensor for tensor in network.outputs if tensor.name in needed_outputs]
    return (
        {config.device_kind, preprocess.device_kind, network.device_kind} == {"GPU"}
        and parse_bool(network.parameters.get(CUDA_GRAPHS, "false"))
        and not NEED_OWN_RUNS & network.parameters.keys()
        and max_run_rows(network) >= config.max_batch_size
        and len(network.inputs) == 1
        and names <= {"cuda"}
        and all(min(tensor.dims, default=1) >= 0 and tensor.datatype != "TYPE_STRING" for tensor in tensors)
    )


def check_overlap(config: ModelConfig, is_bound: bool) -> None:
    """Refuse overlapping batches for a model that cannot have them.

    Raises:
        InvalidConfig: its network does not run in fixed memory.
    """
    if not is_bound:
        raise InvalidConfig(
            f"model '{config.name}', overlap_batches: expected preprocessing and network on a GPU, with "
            f"nereid.cuda_graphs and outputs of fixed shapes, got a network that runs in another way on "
            f"KIND_{config.device_kind}; fix: remove overlap_batches"
        )


def open_stream(device_id: int) -> Any:
    """Return a stream for a network's runs."""
    import cupy

    with cupy.cuda.Device(device_id):
        return cupy.cuda.Stream(non_blocking=True)


def open_device_streams(
    preprocessor: Any, session: Session, computing: Any, input_name: str, needed_outputs: Sequence[str]
) -> DeviceStreams:
    """Record the network's graphs; called by the thread that will run them.

    Args:
        preprocessor: `GpuPreprocessor`, whose tensors the network reads.
        computing: stream of the session.
        input_name, needed_outputs: names of the network's input, and of its outputs that are needed.

    Raises:
        InvalidConfig: a run of the network fails.
    """
    import cupy

    cupy.cuda.Device(preprocessor.device_id).use()
    for tensor in preprocessor.tensors:
        tensor.fill(0)
    cupy.cuda.get_current_stream().synchronize()
    network = session.bind(input_name, preprocessor.tensors, needed_outputs)
    return DeviceStreams(cupy.cuda, preprocessor, network, computing, len(preprocessor.tensors))


class FusedBatch:
    """The requests of one `execute`.

    Args:
        requests: images or error of each request.
        on_run: receives the seconds and rows of the network's run.
    """

    def __init__(
        self,
        requests: Sequence[RequestImages],
        after: PostProcessing,
        trace: BatchTrace | None,
        on_run: Callable[[float, int], None],
    ) -> None:
        self.images = images_of(requests)
        self._requests = requests
        self._after = after
        self._trace = trace
        self._on_run = on_run
        self._errors: Sequence[ServingError | None] = [None] * len(self.images)
        self._times: Sequence[ImageTimes] = ()

    def on_prepared(self, errors: Sequence[ServingError | None], times: Sequence[ImageTimes]) -> None:
        """Store the error and the times of each image."""
        self._errors, self._times = errors, times

    def outcomes(
        self, outputs: Mapping[str, np.ndarray] | ServingError, stages: StageTimestamps | None
    ) -> list[PostProcessingOutcome]:
        """Return the outcome of each request.

        Args:
            outputs: rows of all images by name; empty if nothing was computed. Or the error of the batch.
        """
        good = sum(error is None for error in self._errors)
        if stages:
            self._on_run((stages.computed_ns - stages.start_ns) / 1e9, good)
        for image in self._times:
            image.record_end(stages.decoded_ns, stages.prepared_ns) if stages else image.record_end()
        rows, times = by_request(self._requests, self._errors, self._times)
        if self._trace:
            self._trace.record_preparation(times)
            if stages:
                self._trace.record_run(stages.start_ns, good, stages.computed_ns)
        if isinstance(outputs, ServingError):
            return [outputs if isinstance(outcome, slice) else outcome for outcome in rows]
        if not outputs:
            return [outcome if isinstance(outcome, ServingError) else {} for outcome in rows]
        return self._after.finish(Batch(None, rows, times), self._requests, outputs)

    def run(
        self, streams: DeviceStreams
    ) -> tuple[Mapping[str, np.ndarray] | ServingError, StageTimestamps | None]:
        """Decode and compute the batch alone, in the first slot; return the arguments of `outcomes`."""
        try:
            if not self.images:
                return {}, None
            errors, times = streams.decode(0, self.images)
            self.on_prepared(errors, times)
            if all(errors):
                return {}, None
            streams.compute(0, len(errors))
            result = streams.wait(0)
            streams.release()
            return result
        except Exception as error:  # an exception that leaves `execute` fails the requests with other errors
            return from_exception(error), None

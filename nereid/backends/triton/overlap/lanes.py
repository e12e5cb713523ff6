"""The device's side of a pipeline: three streams, ordered by events, without waiting for a stream or device.

Stream `decoding` belongs to the preprocessor: it decodes, and its kernel writes a slot's tensor. Stream
`computing` runs the network on that tensor, and `copying` copies its outputs to pinned memory.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from nereid.base.serving_errors import ServingError
from nereid.vision.imaging.image_times import ImageTimes


class Preprocessor(Protocol):
    """A decoder of batches into slots: `GpuPreprocessor`."""

    stream: Any
    times: Sequence[ImageTimes]

    def enqueue(self, images: Sequence[bytes], slot: int, decoded: Any) -> list[ServingError | None]:
        """Enqueue a batch on `stream`, and record the event `decoded` after its decoding."""

    def release(self) -> None:
        """Release what the device has read, when nothing is enqueued any more."""


class Network(Protocol):
    """A network with buffers for each slot: `BoundRuns`."""

    def enqueue(self, slot: int, rows: int) -> None:
        """Enqueue a run on the network's stream."""

    def fetch(self, slot: int, rows: int, stream: Any) -> Mapping[str, np.ndarray]:
        """Enqueue the copies of the outputs to the host, and return the arrays that will hold them."""


class Stages(NamedTuple):
    """Ends of a batch's stages, and the begin of its run, in ns since the Unix epoch, from CUDA events."""

    decoded_ns: int
    prepared_ns: int
    begun_ns: int
    computed_ns: int


class Lanes:
    """Streams and events of a pipeline; all methods but `wait` are called by one thread.

    Args:
        cuda: `cupy.cuda`, or its twin in tests.
        computing: stream of the network.
    """

    def __init__(
        self, cuda: Any, preprocessor: Preprocessor, network: Network, computing: Any, slots: int
    ) -> None:
        self._preprocessor, self._network = preprocessor, network
        self._computing, self._copying = computing, cuda.Stream(non_blocking=True)
        self._elapsed_ms = cuda.get_elapsed_time
        self._decoded, self._prepared, self._begun, self._computed, self._copied = (
            [cuda.Event() for _ in range(slots)] for _ in range(5)
        )
        self._outputs: list[Mapping[str, np.ndarray]] = [{} for _ in range(slots)]

    def decode(
        self, slot: int, images: Sequence[bytes]
    ) -> tuple[list[ServingError | None], Sequence[ImageTimes]]:
        """Enqueue decoding and kernel; returns the error and the times of each image."""
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
        self._begun[slot].record(self._computing)
        self._network.enqueue(slot, rows)
        self._computed[slot].record(self._computing)
        self._copying.wait_event(self._computed[slot])
        self._outputs[slot] = self._network.fetch(slot, rows, self._copying)
        self._copied[slot].record(self._copying)

    def wait(self, slot: int) -> tuple[Mapping[str, np.ndarray], Stages]:
        """Wait for the outputs of a slot; they are valid until the slot's next `compute`."""
        self._copied[slot].synchronize()
        now_ns = time.time_ns()
        events = self._decoded[slot], self._prepared[slot], self._begun[slot], self._computed[slot]
        return self._outputs[slot], Stages(
            *(now_ns - round(self._elapsed_ms(event, self._copied[slot]) * 1e6) for event in events)
        )

    def release(self) -> None:
        """Release what the device has read, when no batch is left."""
        self._preprocessor.release()

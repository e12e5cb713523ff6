"""Batches of a model on a GPU that overlap: one is decoded while the network computes the previous one."""

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from queue import SimpleQueue
from typing import Protocol, TypeAlias

import numpy as np

from nereid.backends.triton.device_streams import DeviceStreams, StageTimestamps
from nereid.base.errors import DeviceFailed, ServingError, from_exception
from nereid.vision.imaging.image_times import ImageTimes


@dataclass(frozen=True, slots=True)
class Decode:
    """Enqueue the decoding of a batch into a free slot."""

    slot: int
    batch: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Enqueue the network for the first rows of a slot, and the copies of its outputs to the host."""

    slot: int
    rows: int


@dataclass(frozen=True, slots=True)
class Respond:
    """Wait for the slot's outputs on the host, and send its responses."""

    slot: int


Command: TypeAlias = Decode | Compute | Respond


class _State(Enum):
    FREE = auto()
    DECODING = auto()
    COMPUTING = auto()
    ANSWERING = auto()


class SlotScheduler:
    """The states of `count` slots, and the batches that wait for one.

    One batch is decoded at a time, and batches keep their order.
    """

    def __init__(self, count: int) -> None:
        self._states = [_State.FREE] * count
        self._waiting: deque[int] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no batch waits or occupies a slot."""
        return not self._waiting and set(self._states) == {_State.FREE}

    def on_submitted(self, batch: int) -> list[Command]:
        """Return the commands to run when a batch arrives, in order; the other methods do the same."""
        self._waiting.append(batch)
        return self._decode_next()

    def on_decoded(self, slot: int, rows: int) -> list[Command]:
        """Decoding of a slot's batch is enqueued, or has failed; without rows, nothing is computed."""
        self._move(slot, _State.DECODING, _State.COMPUTING if rows else _State.ANSWERING)
        return [Compute(slot, rows) if rows else Respond(slot), *self._decode_next()]

    def on_computed(self, slot: int) -> list[Command]:
        """The network of the batch in `slot` is enqueued, or has failed."""
        self._move(slot, _State.COMPUTING, _State.ANSWERING)
        return [Respond(slot)]

    def on_answered(self, slot: int) -> list[Command]:
        """All responses of the batch in `slot` are sent, so nothing reads its buffers any more."""
        self._move(slot, _State.ANSWERING, _State.FREE)
        return self._decode_next()

    def _decode_next(self) -> list[Command]:
        if not self._waiting or _State.DECODING in self._states or _State.FREE not in self._states:
            return []
        slot = self._states.index(_State.FREE)
        self._states[slot] = _State.DECODING
        return [Decode(slot, self._waiting.popleft())]

    def _move(self, slot: int, before: _State, after: _State) -> None:
        if self._states[slot] is not before:
            raise ValueError(f"slot {slot}: expected {before.name}, got {self._states[slot].name}")
        self._states[slot] = after


# One batch is decoded, one computed, and one answered.
SLOTS = 3
# A thread that waits for Python's lock gets it after this time. The default, 5 ms, is as long as a batch.
SWITCH_INTERVAL_S = 0.0005


class BatchJob(Protocol):
    """A batch: its images, and what is done with their results."""

    @property
    def images(self) -> Sequence[bytes]:
        """The images of all requests."""

    def on_prepared(self, errors: Sequence[ServingError | None], times: Sequence[ImageTimes]) -> None:
        """Store the error and the times of each image."""

    def answer(
        self, outputs: Mapping[str, np.ndarray] | ServingError, stages: StageTimestamps | None
    ) -> None:
        """Send the responses; must not raise.

        Args:
            outputs: rows of all images by name, valid until the return; empty if nothing was computed. Or the
                error of the batch.
        """


class BatchPipeline:
    """A pipeline of `SLOTS` batches.

    One thread opens, records and enqueues, because recording a graph fails while another thread allocates
    device memory.

    Args:
        open_device_streams: opens the device side; called once, by the thread that uses it.
        on_device_failed: receives the reason after which every batch fails.
        log: receives a line for each defect of this program that only the log can report.
    """

    def __init__(
        self,
        open_device_streams: Callable[[], DeviceStreams],
        on_device_failed: Callable[[str], None],
        log: Callable[[str], None] = print,
    ) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._slots, self._lock = SlotScheduler(SLOTS), threading.Condition()
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._answers: SimpleQueue[int | None] = SimpleQueue()
        self._numbers, self._submitted = itertools.count(), dict[int, BatchJob]()
        self._jobs: list[BatchJob | None] = [None] * SLOTS
        self._errors: list[ServingError | None] = [None] * SLOTS
        self._rows = [0] * SLOTS
        self._on_device_failed, self._failure, self._log = on_device_failed, "", log
        opened: SimpleQueue[DeviceStreams | Exception] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_device, args=(open_device_streams, opened), daemon=True),
            threading.Thread(target=self._run_answers, daemon=True),
        ]
        self._threads[0].start()
        outcome = opened.get()
        if isinstance(outcome, Exception):
            raise outcome
        self._streams = outcome
        self._threads[1].start()

    def submit(self, job: BatchJob) -> None:
        """Hand over a batch, and wait until its decoding begins, so that requests gather for the next one."""
        with self._lock:
            number = next(self._numbers)
            self._submitted[number] = job
            self._execute(self._slots.on_submitted(number))
            self._lock.wait_for(lambda: number not in self._submitted)

    def close(self) -> None:
        """Answer all batches, and end the threads."""
        with self._lock:
            self._lock.wait_for(lambda: self._slots.is_idle)
        self._commands.put(None)
        self._answers.put(None)
        for thread in self._threads:
            thread.join()

    def _execute(self, commands: Sequence[Command]) -> None:
        """Queue commands; the caller holds the lock."""
        for command in commands:
            if isinstance(command, Respond):
                self._answers.put(command.slot)
            else:
                self._commands.put(command)
        self._lock.notify_all()

    def _run_device(
        self,
        open_device_streams: Callable[[], DeviceStreams],
        opened: "SimpleQueue[DeviceStreams | Exception]",
    ) -> None:
        try:
            streams = open_device_streams()
        except Exception as error:
            opened.put(error)
            return
        opened.put(streams)
        while (command := self._commands.get()) is not None:
            if isinstance(command, Decode):
                self._decode(streams, command)
            elif isinstance(command, Compute):
                self._compute(streams, command)

    def _decode(self, streams: DeviceStreams, command: Decode) -> None:
        slot = command.slot
        with self._lock:
            job = self._submitted.pop(command.batch)
            self._jobs[slot], self._errors[slot] = job, None
            self._lock.notify_all()
        rows = 0
        try:
            if self._failure:
                raise DeviceFailed(self._failure)
            errors, times = streams.decode(slot, job.images)
            job.on_prepared(errors, times)
            rows = 0 if all(errors) else len(errors)
        except Exception as error:  # a failed batch must not end the thread
            self._fail_batch(slot, error)
        self._rows[slot] = rows
        with self._lock:
            self._execute(self._slots.on_decoded(slot, rows))

    def _compute(self, streams: DeviceStreams, command: Compute) -> None:
        try:
            streams.compute(command.slot, command.rows)
        except Exception as error:  # a failed batch must not end the thread
            self._fail_batch(command.slot, error)
        with self._lock:
            self._execute(self._slots.on_computed(command.slot))

    def _run_answers(self) -> None:
        while (slot := self._answers.get()) is not None:
            try:
                self._answer(slot)
            except Exception as error:  # the pipeline continues with the other batches
                self._log(f"a batch was not answered: {type(error).__name__}: {error}")
            with self._lock:
                self._execute(self._slots.on_answered(slot))

    def _answer(self, slot: int) -> None:
        job = self._jobs[slot]
        assert job is not None
        outputs: Mapping[str, np.ndarray] = {}
        stages: StageTimestamps | None = None
        try:
            if self._rows[slot] and self._errors[slot] is None:
                outputs, stages = self._streams.wait(slot)
        except Exception as error:
            self._fail_batch(slot, error)
        failed, self._jobs[slot] = self._errors[slot], None
        job.answer(failed or outputs, stages)

    def _fail_batch(self, slot: int, raised: Exception) -> None:
        error = self._errors[slot] = from_exception(raised)
        if isinstance(error, DeviceFailed) and not self._failure:
            self._failure = error.reason
            try:
                self._on_device_failed(self._failure)
            except Exception as problem:  # the batch still needs its responses
                self._log(f"the failed device was not reported: {type(problem).__name__}: {problem}")

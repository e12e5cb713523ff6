"""The scheduler of a pipeline's slots: what happens next to which batch. It has no threads, clock or device.

A slot holds the buffers of one batch from decoding until its responses are sent. One batch is decoded at a
time, and batches keep their order.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Submitted:
    """A batch has arrived."""

    batch: int


@dataclass(frozen=True, slots=True)
class Decoded:
    """Decoding of a slot's batch is enqueued, or has failed; without rows, there is nothing to compute."""

    slot: int
    rows: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The network of the batch in `slot` is enqueued, or has failed."""

    slot: int


@dataclass(frozen=True, slots=True)
class Answered:
    """All responses of the batch in `slot` are sent, so nothing reads its buffers any more."""

    slot: int


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
class Answer:
    """Wait for the slot's outputs on the host, and send its responses."""

    slot: int


Event: TypeAlias = Submitted | Decoded | Computed | Answered
Command: TypeAlias = Decode | Compute | Answer


class _State(Enum):
    FREE = auto()
    DECODING = auto()
    COMPUTING = auto()
    ANSWERING = auto()


class Slots:
    """The states of `count` slots, and the batches that wait for one."""

    def __init__(self, count: int) -> None:
        self._states = [_State.FREE] * count
        self._waiting: deque[int] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether no batch waits or occupies a slot."""
        return not self._waiting and set(self._states) == {_State.FREE}

    def step(self, event: Event) -> list[Command]:
        """Return the commands that follow from an event, in the order of their execution.

        Raises:
            ValueError: the event does not fit the slot's state.
        """
        commands: list[Command] = []
        match event:
            case Submitted(batch):
                self._waiting.append(batch)
            case Decoded(slot, 0):
                self._move(slot, _State.DECODING, _State.ANSWERING, event)
                commands.append(Answer(slot))
            case Decoded(slot, rows):
                self._move(slot, _State.DECODING, _State.COMPUTING, event)
                commands.append(Compute(slot, rows))
            case Computed(slot):
                self._move(slot, _State.COMPUTING, _State.ANSWERING, event)
                commands.append(Answer(slot))
            case Answered(slot):
                self._move(slot, _State.ANSWERING, _State.FREE, event)
        return [*commands, *self._decode_next()]

    def _decode_next(self) -> Iterator[Command]:
        if not self._waiting or _State.DECODING in self._states or _State.FREE not in self._states:
            return
        slot = self._states.index(_State.FREE)
        self._states[slot] = _State.DECODING
        yield Decode(slot, self._waiting.popleft())

    def _move(self, slot: int, before: _State, after: _State, event: Event) -> None:
        if self._states[slot] is not before:
            raise ValueError(f"{event}: expected slot {slot} {before.name}, got {self._states[slot].name}")
        self._states[slot] = after

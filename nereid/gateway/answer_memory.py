"""A gateway's latest answers, kept in memory shared by its workers so that feedback can refer to them."""

import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from struct import Struct

# Each answer maps to one set of entries. When a set is full, its oldest answer is evicted.
SETS, PLACES = 2**13, 8
# Request digest, time, index of the best class, digest of its label, whether it had feedback, names.
ENTRY = Struct("=16sdi8sB112s")
SET_BYTES = PLACES * ENTRY.size
_SEPARATOR = "\0"
_FREE = bytes(16)


@dataclass(frozen=True, slots=True)
class Rated:
    """The answer that feedback refers to; `is_first` is False if it already had feedback."""

    model: str
    variant: str
    is_correct: bool
    is_first: bool


class AnswerMemory:
    """The latest 65,536 answers, shared by forked processes; a killed process leaves no lock behind.

    Args:
        clock: time in seconds, from a clock that all processes share.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._file = os.memfd_create("nereid-answers")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, SETS * SET_BYTES)
        self._memory = mmap.mmap(self._file, SETS * SET_BYTES)

    def remember(self, name: str, model: str, variant: str, index: int, label: str) -> None:
        """Store an answer's best class.

        Args:
            name: id of the request; a later answer with the same id replaces it.
            model, variant: names for the metrics; an answer with longer names is not stored.
            index, label: the best class.
        """
        names = f"{model}{_SEPARATOR}{variant}".encode()
        if len(names) > 112:
            return
        key = _digest(name, 16)
        entry = key, self._clock(), index, _label_digest(label), 0, names
        begin = self._lock(key)
        try:
            if (place := self._find(begin, key)) is None:
                place = self._free(begin)
            ENTRY.pack_into(self._memory, place, *entry)
        finally:
            self._unlock(begin)

    def rate(self, name: str, label: str | int) -> Rated | None:
        """Compare an answer with the true class, given as label or index; None if the answer is unknown."""
        key = _digest(name, 16)
        begin = self._lock(key)
        try:
            place = self._find(begin, key)
            if place is None:
                return None
            _, at_s, index, digest, has_feedback, names = ENTRY.unpack_from(self._memory, place)
            ENTRY.pack_into(self._memory, place, key, at_s, index, digest, 1, names)
        finally:
            self._unlock(begin)
        is_correct = label == index if isinstance(label, int) else _label_digest(label) == digest
        model, variant = names.rstrip(b"\0").decode().partition(_SEPARATOR)[::2]
        return Rated(model, variant, is_correct, not has_feedback)

    def _lock(self, key: bytes) -> int:
        """Lock a key's set against other processes until `_unlock`, and return its offset."""
        number = int.from_bytes(key[:8]) % SETS
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, number)
        return number * SET_BYTES

    def _unlock(self, begin: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, begin // SET_BYTES)

    def _find(self, begin: int, key: bytes) -> int | None:
        for place in range(begin, begin + SET_BYTES, ENTRY.size):
            if self._memory[place : place + 16] == key:
                return place
        return None

    def _free(self, begin: int) -> int:
        """Return the offset of a free entry in a set, or of its oldest answer."""
        oldest, oldest_s = begin, inf
        for place in range(begin, begin + SET_BYTES, ENTRY.size):
            key, at_s, *_ = ENTRY.unpack_from(self._memory, place)
            if key == _FREE:
                return place
            if at_s < oldest_s:
                oldest, oldest_s = place, at_s
        return oldest


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=size).digest()


def _label_digest(label: str) -> bytes:
    """Return a label's digest, ignoring case and surrounding spaces."""
    return _digest(label.strip().casefold(), 8)

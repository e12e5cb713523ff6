"""In-memory tables shared by a gateway's workers, and the table of the latest predictions."""

import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct
from typing import Any

# Each name maps to one set of records. When a set is full, its oldest record is evicted.
SETS, SLOTS_PER_SET = 2**13, 8
_FREE = bytes(16)


class SharedTable:
    """The 65,536 latest records, shared by forked processes; a killed process leaves no lock behind.

    Args:
        fields: format of a record, as of `struct`; the first field is the time of its last change.
    """

    def __init__(self, fields: str) -> None:
        self._record = Struct(f"=16s{fields}")
        self._file = os.memfd_create("nereid-table")
        weakref.finalize(self, os.close, self._file)
        size = SETS * SLOTS_PER_SET * self._record.size
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)

    @contextmanager
    def locked(self, name: str) -> Iterator[list[Any]]:
        """Yield the fields of a name's record, [] if there is none, and store them on exit.

        Until then, other processes wait for the record. Fields that are empty on exit store nothing.
        """
        key = digest(name, 16)
        set_index = int.from_bytes(key[:8]) % SETS
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, set_index)
        try:
            offset, fields = self._find(set_index, key)
            yield fields
            if fields:
                self._record.pack_into(self._memory, offset, key, *fields)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, set_index)

    def _find(self, set_index: int, key: bytes) -> tuple[int, list[Any]]:
        """Return the offset of a key's record and its fields; without one, where it may be stored, and []."""
        replaced, oldest = 0, (True, float("inf"))
        for index in range(set_index * SLOTS_PER_SET, (set_index + 1) * SLOTS_PER_SET):
            offset = index * self._record.size
            stored_key, at, *fields = self._record.unpack_from(self._memory, offset)
            if stored_key == key:
                return offset, [at, *fields]
            if (age := (stored_key != _FREE, at)) < oldest:
                replaced, oldest = offset, age
        return replaced, []


def digest(text: str, size: int) -> bytes:
    """Return the BLAKE2b digest of a text."""
    return blake2b(text.encode(errors="surrogatepass"), digest_size=size).digest()


@dataclass(frozen=True, slots=True)
class RatedPrediction:
    """The prediction that feedback refers to; `is_first` is False if it already had feedback."""

    model: str
    variant: str
    is_correct: bool
    is_first: bool


# Time, index of the best class, digest of its label, whether it had feedback, model and variant.
_PREDICTION, _MAX_NAMES, _SEPARATOR = "di8s?112s", 112, "\0"


class RecentPredictions:
    """The latest predictions, so that feedback can refer to them.

    Args:
        clock: time in seconds, from a clock that all processes share.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._predictions = clock, SharedTable(_PREDICTION)

    def remember(self, name: str, model: str, variant: str, index: int, label: str) -> None:
        """Store a prediction's best class.

        Args:
            name: id of the request; a later prediction with the same id replaces it.
            model, variant: names for the metrics; a prediction with longer names is not stored.
            index, label: the best class.
        """
        names = f"{model}{_SEPARATOR}{variant}".encode()
        if len(names) <= _MAX_NAMES:
            with self._predictions.locked(name) as fields:
                fields[:] = self._clock(), index, _label_digest(label), False, names

    def rate(self, name: str, label: str | int) -> RatedPrediction | None:
        """Compare a prediction with the true class, a label or an index; None if it is unknown."""
        with self._predictions.locked(name) as fields:
            if not fields:
                return None
            _, index, label_digest, has_feedback, names = fields
            fields[3] = True
        is_correct = label == index if isinstance(label, int) else _label_digest(label) == label_digest
        model, variant = names.rstrip(b"\0").decode().partition(_SEPARATOR)[::2]
        return RatedPrediction(model, variant, is_correct, not has_feedback)


def _label_digest(label: str) -> bytes:
    """Return a label's digest, ignoring case and surrounding spaces."""
    return digest(label.strip().casefold(), 8)

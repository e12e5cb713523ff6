"""The token buckets of quotas, in memory that the workers of a gateway share."""

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct

# More entries than keys in the largest key file. An entry has the key's number (0: free), the tokens, and the
# time of the last change, of the monotonic clock that all processes share.
SLOTS, ENTRY = 2**14, Struct("=Qdd")
# A key whose entry is not among so many takes the oldest of them.
MAX_TRIES = 32


class SharedBuckets:
    """Buckets that forked processes share; a killed process leaves no lock."""

    def __init__(self) -> None:
        self._file = os.memfd_create("nereid-buckets")
        os.ftruncate(self._file, SLOTS * ENTRY.size)
        self._memory = mmap.mmap(self._file, SLOTS * ENTRY.size)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let no other process read or change a bucket."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def get(self, key_id: str) -> tuple[float, float] | None:
        """Return the tokens of a key and the time of their last change, None for a new key."""
        number = _number(key_id)
        found, tokens, at_s = ENTRY.unpack_from(self._memory, self._place(number))
        return (tokens, at_s) if found == number else None

    def put(self, key_id: str, tokens: float, at_s: float) -> None:
        """Store the tokens of a key."""
        number = _number(key_id)
        ENTRY.pack_into(self._memory, self._place(number), number, tokens, at_s)

    def _place(self, number: int) -> int:
        places = [(number + each) % SLOTS * ENTRY.size for each in range(MAX_TRIES)]
        oldest, oldest_s = places[0], float("inf")
        for place in places:
            found, _, at_s = ENTRY.unpack_from(self._memory, place)
            if found in (number, 0):
                return place
            if at_s < oldest_s:
                oldest, oldest_s = place, at_s
        return oldest


def _number(key_id: str) -> int:
    """Return a key's id, eight hexadecimal digits or none, as a number from 1."""
    return int(key_id, 16) + 2 if key_id else 1

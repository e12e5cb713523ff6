"""The token buckets of quotas, in memory that the workers of a gateway share."""

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from struct import Struct

# More entries than keys in the largest key file. An entry has the key's number (0: free), the tokens, and the
# time of the last change, of the monotonic clock that all processes share.
SLOTS, ENTRY = 2**14, Struct("=Qdd")
# Entries that are searched for a key. If none of them is its own or free, the key takes the oldest one.
MAX_TRIES = 32


@dataclass(slots=True)
class Bucket:
    """The tokens of one key, and the time of their last change in seconds; `at_s` is None for a new key."""

    tokens: float = 0.0
    at_s: float | None = None


class TokenBuckets:
    """Buckets that forked processes share; a killed process leaves no lock."""

    def __init__(self) -> None:
        self._file = os.memfd_create("nereid-buckets")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, SLOTS * ENTRY.size)
        self._memory = mmap.mmap(self._file, SLOTS * ENTRY.size)

    @contextmanager
    def held(self, key_id: str) -> Iterator[Bucket]:
        """Give the bucket of a key, which no other process changes meanwhile, and store it afterwards."""
        number = int.from_bytes(blake2b(key_id.encode(), digest_size=8).digest()) or 1
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            place, is_own = self._place(number)
            bucket = Bucket(*ENTRY.unpack_from(self._memory, place)[1:]) if is_own else Bucket()
            yield bucket
            if bucket.at_s is not None:
                ENTRY.pack_into(self._memory, place, number, bucket.tokens, bucket.at_s)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _place(self, number: int) -> tuple[int, bool]:
        """Return the place of a key's entry, and whether the entry is its own."""
        oldest, oldest_s = 0, inf
        for each in range(MAX_TRIES):
            place = (number + each) % SLOTS * ENTRY.size
            found, _, at_s = ENTRY.unpack_from(self._memory, place)
            if found in (number, 0):
                return place, found == number
            if at_s < oldest_s:
                oldest, oldest_s = place, at_s
        return oldest, False

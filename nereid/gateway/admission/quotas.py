"""Quotas: images per second of each key, as token buckets."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from nereid.gateway.admission.keys import Key
from nereid.gateway.failures import Failure


class Buckets(Protocol):
    """The tokens of each key, and the time of their last change; between `get` and `put` a lock is held."""

    def locked(self) -> AbstractContextManager[None]:
        """Let nobody else read or change a bucket."""

    def get(self, key_id: str) -> tuple[float, float] | None:
        """Return the tokens of a key and the time of their last change, None for a new key."""

    def put(self, key_id: str, tokens: float, at_s: float) -> None:
        """Store the tokens of a key."""


class OwnBuckets:
    """The buckets of a gateway with one process and one thread."""

    def __init__(self) -> None:
        self._filled: dict[str, tuple[float, float]] = {}

    def locked(self) -> AbstractContextManager[None]:
        """Return a context without a lock."""
        return nullcontext()

    def get(self, key_id: str) -> tuple[float, float] | None:
        """Return the tokens of a key and the time of their last change, None for a new key."""
        return self._filled.get(key_id)

    def put(self, key_id: str, tokens: float, at_s: float) -> None:
        """Store the tokens of a key."""
        self._filled[key_id] = tokens, at_s


class Quotas:
    """Token buckets, one per key.

    Args:
        rate_per_s: rate of keys without their own rate; None for no limit.
        burst: capacity of a bucket, in images.
        buckets: the tokens of the keys; default: those of this process only.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        rate_per_s: float | None,
        burst: int,
        buckets: Buckets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate_per_s, self._burst, self._clock = rate_per_s, burst, clock
        self._buckets = buckets or OwnBuckets()

    def take(self, key: Key | None, tokens: int = 1, is_debt: bool = False) -> None:
        """Take tokens from the bucket of a key; callers without a key share one bucket.

        Args:
            key: owner of the bucket.
            tokens: one per image.
            is_debt: take tokens even from an empty bucket; later requests then wait longer.

        Raises:
            Failure: `rate_limited`, with the time after which a token is available.
        """
        own = None if key is None else key.rate_per_s
        rate_per_s = self._rate_per_s if own is None else own
        if rate_per_s is None:
            return
        name = key.id if key else ""
        with self._buckets.locked():
            now_s = self._clock()
            left, at_s = self._buckets.get(name) or (float(self._burst), now_s)
            left = min(float(self._burst), left + (now_s - at_s) * rate_per_s)
            is_enough = left >= tokens or is_debt
            self._buckets.put(name, left - tokens if is_enough else left, now_s)
        if not is_enough:
            wait_s = (tokens - left) / rate_per_s if rate_per_s else 3600.0
            raise Failure("rate_limited", f"more than {rate_per_s:g} images per second", wait_s)

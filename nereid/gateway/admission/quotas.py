"""Quotas: images per second of each key, as token buckets."""

import time
from collections.abc import Callable

from nereid.gateway.admission.keys import Key
from nereid.gateway.admission.token_buckets import TokenBuckets
from nereid.gateway.failures import Failure


class Quotas:
    """Token buckets, one per key.

    Args:
        rate_per_s: rate of keys without their own rate; None for no limit.
        burst: capacity of a bucket, in images.
        buckets: the tokens of the keys; default: new ones.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        rate_per_s: float | None,
        burst: int,
        buckets: TokenBuckets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate_per_s, self._burst, self._clock = rate_per_s, burst, clock
        self._buckets = buckets or TokenBuckets()

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
        if rate_per_s is None or not tokens:
            return
        with self._buckets.held(key.id if key else "") as bucket:
            now_s, left = self._clock(), float(self._burst)
            if bucket.at_s is not None:
                left = min(left, bucket.tokens + (now_s - bucket.at_s) * rate_per_s)
            is_enough = left >= tokens or is_debt
            bucket.tokens, bucket.at_s = left - tokens if is_enough else left, now_s
        if not is_enough:
            wait_s = (tokens - left) / rate_per_s if rate_per_s else 3600.0
            raise Failure("rate_limited", f"more than {rate_per_s:g} images per second", wait_s)

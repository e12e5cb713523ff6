"""The adaptive limit of requests in flight, from measured round trips.

Source: the update is that of Netflix's Gradient2Limit (github.com/Netflix/concurrency-limits), with Envoy's
square root as the room to grow. They compare the round trip with a long average, or with a minimum. A long
average follows a permanent queue, so the limit would grow during overload. A minimum is the round trip of the
smallest image. Here the round trip is compared with one measured at half the limit: every `PROBE_S` seconds
the limit is halved until enough responses have come. If round trips at half the limit are more than
`TOLERANCE` times as fast, the other half of the requests only waited, and the limit falls. The probe costs no
throughput while the limit is at least twice the number of requests that keep the server busy. A server that
batches needs more requests, and gets a higher limit.
"""

from math import inf, sqrt

# Enough for two instances with batches of eight, and more than the connections of one browser.
MIN_LIMIT, INITIAL_LIMIT = 16.0, 24.0
TOLERANCE, SMOOTHING = 1.5, 0.5
WINDOW_S, WINDOW_SAMPLES = 0.1, 10
# With little load, responses are rare, and an estimate should not be old.
MAX_WINDOW_S = 1.0
PROBE_S, PROBE_SAMPLES = 10.0, 30
QUIET_SMOOTHING = 0.2
DROP = 0.9


class ConcurrencyLimit:
    """An adaptive limit; pure, since times are arguments.

    Attributes:
        rtt_s: mean round trip of the last window, 0 before the first.

    Args:
        max_limit: upper bound of the limit.
        now_s: monotonic time in seconds.
    """

    def __init__(self, max_limit: int, now_s: float) -> None:
        self._max_limit = float(max_limit)
        self._min_limit = min(MIN_LIMIT, self._max_limit)
        self._limit = min(INITIAL_LIMIT, self._max_limit)
        self._base_s = self.rtt_s = 0.0
        self._probed_s = now_s
        self._open(now_s)

    def _open(self, now_s: float, is_probing: bool = False) -> None:
        self._opened_s, self._is_probing = now_s, is_probing
        # Requests sent before the queue has shrunk do not count: they waited in the longer queue.
        self._since_s = inf if is_probing else -inf
        self._samples = self._peak = 0
        self._sum_s = 0.0

    @property
    def limit(self) -> int:
        """The present limit of requests in flight."""
        return int(max(self._min_limit, self._limit / 2) if self._is_probing else self._limit)

    @property
    def steady(self) -> int:
        """The limit, also while it is halved for a probe."""
        return int(self._limit)

    def sample(self, rtt_s: float, in_flight: int, now_s: float) -> None:
        """Record a response that took `rtt_s` seconds; `in_flight` requests remain."""
        self._peak = max(self._peak, in_flight + 1)
        if in_flight < self.limit:
            self._since_s = min(self._since_s, now_s)
        if now_s - rtt_s < self._since_s:
            return
        self._samples += 1
        self._sum_s += rtt_s
        wanted = PROBE_SAMPLES if self._is_probing else WINDOW_SAMPLES
        age_s = now_s - self._opened_s
        if age_s >= (WINDOW_S if self._samples >= wanted else MAX_WINDOW_S):
            self._close(now_s)

    def dropped(self) -> None:
        """Record that the server rejected a request because of overload."""
        self._limit = max(self._min_limit, self._limit * DROP)

    def _close(self, now_s: float) -> None:
        self.rtt_s = self._sum_s / self._samples
        is_quiet = self._peak <= self._limit / 2
        if self._is_probing or is_quiet:
            weight = 1.0 if self._is_probing or not self._base_s else QUIET_SMOOTHING
            self._base_s += weight * (self.rtt_s - self._base_s)
            self._probed_s = now_s
        elif self._base_s:
            self._update()
        self._open(now_s, is_probing=not is_quiet and self._is_stale(now_s))

    def _is_stale(self, now_s: float) -> bool:
        # At the bottom and still slow, or faster than with half as many: the base is wrong.
        is_slower = self._limit <= self._min_limit and self.rtt_s > TOLERANCE * self._base_s
        is_faster = self.rtt_s < self._base_s / TOLERANCE
        return is_slower or is_faster or not self._base_s or now_s - self._probed_s >= PROBE_S

    def _update(self) -> None:
        gradient = min(1.0, max(0.5, TOLERANCE * self._base_s / self.rtt_s))
        wanted = self._limit * gradient + sqrt(self._limit) / 2
        limit = self._limit + SMOOTHING * (wanted - self._limit)
        self._limit = min(self._max_limit, max(self._min_limit, limit))

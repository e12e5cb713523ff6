"""How many requests may be in flight: found by watching how long they take.

Source: the update is that of Netflix's Gradient2Limit (github.com/Netflix/concurrency-limits), with Envoy's
square root as the room to grow. They compare the round trip with a long average, or with a minimum. The
average follows a queue that stays, so that the limit creeps up for as long as there is overload; the minimum
is that of the smallest image. Here the round trip is compared with one measured at half the limit: every
`PROBE_S` the limit is halved until enough answers have come. If half as many are answered more than
`TOLERANCE` times as fast, the other half only waited. That costs no throughput as long as the limit is twice
what the server needs, and it takes dynamic batches as what they are: a reason to allow more.
"""

from math import inf, sqrt

# Two instances fill batches of eight with that; it is also more than a browser opens connections to a host.
FEWEST, INITIAL = 16.0, 24.0
TOLERANCE, SMOOTHING = 1.5, 0.5
WINDOW_S, WINDOW_SAMPLES = 0.1, 10
# Without load answers are rare, and an estimate should not be old.
LONGEST_WINDOW_S = 1.0
PROBE_S, PROBE_SAMPLES = 10.0, 30
QUIET_SMOOTHING = 0.2
DROP = 0.9


class Gradient:
    """An adaptive limit; pure, times are handed in.

    Attributes:
        rtt_s: mean round trip of the last window, 0 before the first.

    Args:
        most: upper bound of the limit.
        now_s: the time, in seconds of any clock that never jumps.
    """

    _opened_s: float
    _since_s: float
    _sum_s: float
    _samples: int
    _peak: int
    _is_probing: bool

    def __init__(self, most: int, now_s: float) -> None:
        self._most = float(most)
        self._fewest = min(FEWEST, self._most)
        self._limit = min(INITIAL, self._most)
        self._base_s = self.rtt_s = 0.0
        self._probed_s = now_s
        self._open(now_s)

    @property
    def limit(self) -> int:
        """How many may be in flight now."""
        return int(max(self._fewest, self._limit / 2) if self._is_probing else self._limit)

    @property
    def steady(self) -> int:
        """The limit, also while it is halved for a probe."""
        return int(self._limit)

    def sample(self, rtt_s: float, in_flight: int, now_s: float) -> None:
        """Take note of an answer that took `rtt_s`; `in_flight` are left."""
        self._peak = max(self._peak, in_flight + 1)
        if in_flight < self.limit:
            self._since_s = min(self._since_s, now_s)
        if now_s - rtt_s < self._since_s:
            return
        self._samples += 1
        self._sum_s += rtt_s
        wanted = PROBE_SAMPLES if self._is_probing else WINDOW_SAMPLES
        age_s = now_s - self._opened_s
        if age_s >= (WINDOW_S if self._samples >= wanted else LONGEST_WINDOW_S):
            self._close(now_s)

    def dropped(self) -> None:
        """Take note that the server itself refused for overload."""
        self._limit = max(self._fewest, self._limit * DROP)

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
        is_slower = self._limit <= self._fewest and self.rtt_s > TOLERANCE * self._base_s
        is_faster = self.rtt_s < self._base_s / TOLERANCE
        return is_slower or is_faster or not self._base_s or now_s - self._probed_s >= PROBE_S

    def _update(self) -> None:
        gradient = min(1.0, max(0.5, TOLERANCE * self._base_s / self.rtt_s))
        wanted = self._limit * gradient + sqrt(self._limit) / 2
        limit = self._limit + SMOOTHING * (wanted - self._limit)
        self._limit = min(self._most, max(self._fewest, limit))

    def _open(self, now_s: float, is_probing: bool = False) -> None:
        self._opened_s, self._is_probing = now_s, is_probing
        # What was sent before the probe's shorter queue is reached does not count: it waited in the longer.
        self._since_s = inf if is_probing else -inf
        self._samples = self._peak = 0
        self._sum_s = 0.0

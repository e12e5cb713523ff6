"""How long to wait before something that keeps failing is tried again."""

from collections.abc import Sequence


class BackOff:
    """Waits longer each time, and forgets the past once all was well for a while.

    Args:
        delays_s: the waits in their order; the last is that of all further ones.
        calm_s: after so long without a failure the first wait comes again.
    """

    def __init__(self, delays_s: Sequence[float], calm_s: float) -> None:
        self._delays_s, self._calm_s = delays_s, calm_s
        self._failures = 0

    def next_s(self, ran_s: float) -> float:
        """Return how many seconds to wait after a failure that came after `ran_s` seconds without one."""
        if ran_s >= self._calm_s:
            self._failures = 0
        delay = self._delays_s[min(self._failures, len(self._delays_s) - 1)]
        self._failures += 1
        return delay

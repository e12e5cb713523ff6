"""What each caller may hold of the gRPC port: by address before it shows a key, and by key afterwards."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any


@dataclass(frozen=True, slots=True)
class Allowance:
    """Limits of one holder. Rates are per second; a burst is what may come in one moment.

    `frames` counts frames that carry little, `resets` calls that the client has cancelled, and `begins` calls
    that need no key or show no valid one.
    """

    connections: int
    calls: int
    frames: int
    frames_per_s: int
    resets: int
    resets_per_s: int
    begins: int
    begins_per_s: int


PEER = Allowance(
    connections=64,
    calls=32,
    frames=1000,
    frames_per_s=200,
    resets=100,
    resets_per_s=10,
    begins=200,
    begins_per_s=50,
)
KEY = Allowance(
    connections=256,
    calls=1024,
    frames=20_000,
    frames_per_s=2000,
    resets=1000,
    resets_per_s=200,
    begins=200,
    begins_per_s=50,
)
# Names that are remembered although they hold nothing.
MAX_IDLE = 4096


class Tokens:
    """A budget that refills with time.

    Args:
        burst: the most that it holds, and what it begins with.
        rate_per_s: what it gains each second.
        clock: monotonic time in seconds.
    """

    __slots__ = ("_at_s", "_burst", "_clock", "_left", "_rate_per_s")

    def __init__(self, burst: int, rate_per_s: int, clock: Callable[[], float]) -> None:
        self._burst, self._rate_per_s, self._clock = burst, rate_per_s, clock
        self._left, self._at_s = float(burst), clock()

    def take(self, amount: float) -> bool:
        """Take an amount; return whether there was enough."""
        now_s = self._clock()
        self.give((now_s - self._at_s) * self._rate_per_s)
        self._at_s = now_s
        if amount > self._left:
            return False
        self._left -= amount
        return True

    def give(self, amount: float) -> None:
        """Add an amount, up to the burst."""
        self._left = min(self._burst, self._left + amount)


@dataclass(eq=False, slots=True)
class Holder:
    """What one address or key holds: its connections, the oldest first, its open calls, and its budgets."""

    allowance: Allowance
    frames: Tokens
    resets: Tokens
    begins: Tokens
    connections: dict[Any, None] = field(default_factory=dict)
    calls: int = 0


class Holders:
    """The holders by name.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, Allowance], Holder] = {}

    def find(self, name: str, allowance: Allowance) -> Holder:
        """Return the holder with a name and an allowance, which may be new."""
        place = name, allowance
        if holder := self._known.get(place):
            return holder
        if len(self._known) >= MAX_IDLE:
            self._known = {n: each for n, each in self._known.items() if each.connections or each.calls}
        given, clock = allowance, self._clock
        holder = self._known[place] = Holder(
            given,
            Tokens(given.frames, given.frames_per_s, clock),
            Tokens(given.resets, given.resets_per_s, clock),
            Tokens(given.begins, given.begins_per_s, clock),
        )
        return holder


def peer_of(address: Any) -> str:
    """Return what stands for a client's address: of IPv6 its network of 64 bits, which one client has."""
    if not address:
        return ""
    found = ip_address(str(address[0]).partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    if found.version == 6 and mapped is None:
        return str(int(found) >> 64)
    return str(mapped or found)

"""What became of the requests of a load test: counts and histograms that add up over processes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hdrh.histogram import HdrHistogram

# Microseconds up to an hour, to three digits: 1 ms of 1 s.
LOWEST_US, HIGHEST_US, DIGITS = 1, 3_600_000_000, 3
# Reasons beyond so many count as one: a server may put anything into a message.
MOST_REASONS, OTHER = 50, "other reasons"
MOST_LETTERS = 200
STRAYED = "a sticky key got one variant from one process and another from another"


class Histogram:
    """Latencies in milliseconds, each within 0.1 %."""

    def __init__(self) -> None:
        self._hdr = HdrHistogram(LOWEST_US, HIGHEST_US, DIGITS)

    def add(self, latency_ms: float) -> None:
        """Count a latency; what is out of range counts as the nearest that is not."""
        self._hdr.record_value(min(max(round(latency_ms * 1e3), LOWEST_US), HIGHEST_US))

    def percentile_ms(self, percent: float) -> float:
        """Return what so many per cent do not exceed; 0 if nothing was counted."""
        return float(self._hdr.get_value_at_percentile(percent)) / 1e3

    @property
    def count(self) -> int:
        """How many were counted."""
        return int(self._hdr.get_total_count())

    def merge(self, encoded: bytes) -> None:
        """Add those of another one, as `encode` gives them."""
        self._hdr.decode_and_add(encoded)

    def encode(self) -> bytes:
        """Return it in HdrHistogram's own compressed form (V2, base64)."""
        return bytes(self._hdr.encode())


@dataclass(slots=True)
class Series:
    """Requests of one protocol.

    Attributes:
        planned: how many were to be sent; none are planned in a closed loop.
        good: how many were answered rightly.
        failures: how often, by reason.
        backlog_max: how many were due and waited for a free caller; over several processes the sum of what
            each had at most.
        in_flight_max: how many waited for their answer at once; likewise.
        response: from the intended start.
        service: from the actual start.
    """

    planned: int = 0
    good: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    backlog_max: int = 0
    in_flight_max: int = 0
    response: Histogram = field(default_factory=Histogram)
    service: Histogram = field(default_factory=Histogram)

    @property
    def requests(self) -> int:
        """How many have come to an end."""
        return self.good + self.failures.total()

    def add(self, response_ms: float, service_ms: float, failure: str) -> None:
        """Count one request; `failure` is empty for a right answer."""
        if failure:
            self.fail(failure)
        else:
            self.good += 1
        self.response.add(response_ms)
        self.service.add(service_ms)

    def fail(self, reason: str, times: int = 1) -> None:
        """Count failures by reason, as far as reasons can be told apart."""
        reason = reason[:MOST_LETTERS]
        is_known = reason in self.failures or len(self.failures) < MOST_REASONS
        self.failures[reason if is_known else OTHER] += times

    def recant(self, reason: str) -> None:
        """Count one request, so far right, as a failure."""
        self.good -= 1
        self.fail(reason)

    def encode(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "planned": self.planned,
            "good": self.good,
            "failures": dict(self.failures),
            "backlog_max": self.backlog_max,
            "in_flight_max": self.in_flight_max,
            "response": self.response.encode(),
            "service": self.service.encode(),
        }

    def merge(self, encoded: Mapping[str, Any]) -> None:
        """Add another one, as `encode` gives it."""
        self.planned += encoded["planned"]
        self.good += encoded["good"]
        self.backlog_max += encoded["backlog_max"]
        self.in_flight_max += encoded["in_flight_max"]
        for reason, times in encoded["failures"].items():
            self.fail(reason, times)
        self.response.merge(encoded["response"])
        self.service.merge(encoded["service"])


@dataclass(slots=True)
class Ledger:
    """A load test as one process saw it, or all of them.

    Attributes:
        series: by protocol.
        processes: how many are in it.
        schedule_s: for how long requests were sent.
        seconds: the same until the last of them had ended.
        cpu_share: CPU seconds per second of the process that took most.
        variants: which variant answered a sticky key first, and over which protocol.
    """

    series: dict[str, Series] = field(default_factory=dict)
    processes: int = 1
    schedule_s: float = 0.0
    seconds: float = 0.0
    cpu_share: float = 0.0
    variants: dict[str, tuple[str, str]] = field(default_factory=dict)

    def of(self, protocol: str) -> Series:
        """Return the series of a protocol, an empty one if it is new."""
        return self.series.setdefault(protocol, Series())

    def moved(self, key: str, variant: str, protocol: str) -> str:
        """Return which other variant has answered this sticky key before, if any."""
        before, _ = self.variants.setdefault(key, (variant, protocol))
        return before if before != variant else ""

    def encode(self) -> dict[str, Any]:
        """Return it as plain values, for another process."""
        return {
            "series": {protocol: series.encode() for protocol, series in self.series.items()},
            "schedule_s": self.schedule_s,
            "seconds": self.seconds,
            "cpu_share": self.cpu_share,
            "variants": self.variants,
        }

    @classmethod
    def merged(cls, encoded: Iterable[Mapping[str, Any]]) -> "Ledger":
        """Return those of several processes as one."""
        whole = cls(processes=0)
        for each in encoded:
            whole.processes += 1
            whole.schedule_s = max(whole.schedule_s, each["schedule_s"])
            whole.seconds = max(whole.seconds, each["seconds"])
            whole.cpu_share = max(whole.cpu_share, each["cpu_share"])
            for protocol, series in each["series"].items():
                whole.of(protocol).merge(series)
            whole._merge_variants(each["variants"])
        return whole

    def _merge_variants(self, variants: Mapping[str, tuple[str, str]]) -> None:
        for key, (variant, protocol) in variants.items():
            if self.moved(key, variant, protocol):
                self.of(protocol).recant(STRAYED)

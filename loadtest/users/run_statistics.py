"""The statistics of a load test: counts and histograms, which add up over processes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hdrh.histogram import HdrHistogram

# Microseconds up to an hour, to three digits.
MIN_US, MAX_US, DIGITS = 1, 3_600_000_000, 3
# More reasons than this count as one, because a server may put anything into a message.
MAX_REASONS, OTHER = 50, "other reasons"
MAX_REASON_CHARACTERS = 200
STRAYED = "a sticky key got different variants in two processes"


class Histogram:
    """Latencies in milliseconds, each within 0.1 %."""

    def __init__(self) -> None:
        self._hdr = HdrHistogram(MIN_US, MAX_US, DIGITS)

    def add(self, latency_ms: float) -> None:
        """Count a latency; a value out of range counts as the nearest valid one."""
        self._hdr.record_value(min(max(round(latency_ms * 1e3), MIN_US), MAX_US))

    def percentile_ms(self, percent: float) -> float:
        """Return the value that `percent` per cent do not exceed, or 0 without any value."""
        return float(self._hdr.get_value_at_percentile(percent)) / 1e3

    def merge(self, encoded: bytes) -> None:
        """Add another histogram, as `encode` returns it."""
        self._hdr.decode_and_add(encoded)

    def encode(self) -> bytes:
        """Return HdrHistogram's own compressed form (V2, base64)."""
        return bytes(self._hdr.encode())


@dataclass(slots=True)
class ProtocolStatistics:
    """The requests of one protocol, with the number of failures by reason.

    Attributes:
        planned: requests of the schedule; 0 in a closed loop.
        backlog_max: most requests that were due and had no free caller; summed over processes.
        response: latencies from the due time.
        service: latencies from the actual start.
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
        """The number of finished requests."""
        return self.good + self.failures.total()

    def add(self, response_ms: float, service_ms: float, failure: str) -> None:
        """Count one request; `failure` is empty for a correct response."""
        if failure:
            self.fail(failure)
        else:
            self.good += 1
        self.response.add(response_ms)
        self.service.add(service_ms)

    def fail(self, reason: str, times: int = 1) -> None:
        """Count failures by reason, up to a limit of different reasons."""
        reason = reason[:MAX_REASON_CHARACTERS]
        is_known = reason in self.failures or len(self.failures) < MAX_REASONS
        self.failures[reason if is_known else OTHER] += times

    def encode(self) -> dict[str, Any]:
        """Return the statistics as plain values."""
        return {
            **{name: getattr(self, name) for name in _SUMMED},
            "failures": dict(self.failures),
            "response": self.response.encode(),
            "service": self.service.encode(),
        }

    def merge(self, encoded: Mapping[str, Any]) -> None:
        """Add other statistics, as `encode` returns them."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + encoded[name])
        for reason, times in encoded["failures"].items():
            self.fail(reason, times)
        self.response.merge(encoded["response"])
        self.service.merge(encoded["service"])


_SUMMED = ("planned", "good", "backlog_max", "in_flight_max")
_LARGEST = ("schedule_s", "seconds", "cpu_share")


@dataclass(slots=True)
class RunStatistics:
    """The statistics of one process of a load test, or of all processes.

    Attributes:
        schedule_s: duration of the schedule.
        seconds: duration until the last request ended.
        cpu_share: CPU seconds per second of the busiest process.
        variants: the variant and protocol of each sticky key's first response.
    """

    series: dict[str, ProtocolStatistics] = field(default_factory=dict)
    processes: int = 1
    schedule_s: float = 0.0
    seconds: float = 0.0
    cpu_share: float = 0.0
    variants: dict[str, tuple[str, str]] = field(default_factory=dict)

    def of(self, protocol: str) -> ProtocolStatistics:
        """Return the statistics of a protocol, empty for a new one."""
        return self.series.setdefault(protocol, ProtocolStatistics())

    def moved(self, key: str, variant: str, protocol: str) -> str:
        """Return the earlier variant of a sticky key if it differs, else an empty string."""
        before, _ = self.variants.setdefault(key, (variant, protocol))
        return before if before != variant else ""

    def encode(self) -> dict[str, Any]:
        """Return the statistics as plain values, for another process."""
        series = {protocol: statistics.encode() for protocol, statistics in self.series.items()}
        numbers = {name: getattr(self, name) for name in _LARGEST}
        return {"series": series, "variants": self.variants, **numbers}

    @classmethod
    def merged(cls, encoded: Iterable[Mapping[str, Any]]) -> "RunStatistics":
        """Combine the statistics of several processes."""
        whole = cls(processes=0)
        for part in encoded:
            whole.processes += 1
            for name in _LARGEST:
                setattr(whole, name, max(getattr(whole, name), part[name]))
            for protocol, series in part["series"].items():
                whole.of(protocol).merge(series)
            for key, (variant, protocol) in part["variants"].items():
                if whole.moved(key, variant, protocol):
                    whole.of(protocol).good -= 1
                    whole.of(protocol).fail(STRAYED)
        return whole

"""The report of a load test, for a person and for a program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadtest import record
from loadtest.users.run_statistics import Histogram, ProtocolStatistics, RunStatistics

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99_9": 99.9, "max": 100.0}
HEADINGS = (
    *("protocol", "requests", "failed", "1/s", "target", "ratio", "backlog", "latency"),
    *("p50", "p90", "p99", "p99.9", "max"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One protocol. Latencies are in milliseconds, by the names of `PERCENTILES`.

    `rate_per_s` counts correct responses until the last one, `target_per_s` the requests of the schedule.
    The target and its ratio are None in a closed loop.
    """

    protocol: str
    requests: int
    failures: Mapping[str, int]
    rate_per_s: float
    target_per_s: float | None
    achieved_ratio: float | None
    backlog_max: int
    in_flight_max: int
    response_ms: Mapping[str, float]
    service_ms: Mapping[str, float]

    @property
    def failed(self) -> int:
        """The number of failed requests."""
        return sum(self.failures.values())

    @property
    def good(self) -> int:
        """The number of correct responses."""
        return self.requests - self.failed

    @property
    def error_ratio(self) -> float:
        """The share of requests that failed."""
        return self.failed / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """One run of a scenario.

    `generator_cpu` is in cores, of the busiest generator process. `lost` counts the processes that ended
    before the run; the outcomes of their last requests are unknown.
    """

    scenario: str
    seconds: float
    processes: int
    generator_cpu: float
    rows: tuple[Row, ...]
    lost: int = 0

    @classmethod
    def of(cls, scenario: str, statistics: RunStatistics, lost: int = 0) -> "Report":
        """Build the report from statistics."""
        rows = [_row(protocol, series, statistics) for protocol, series in sorted(statistics.series.items())]
        seconds, cpu = round(statistics.seconds, 2), round(statistics.cpu_share, 3)
        return cls(scenario, seconds, statistics.processes, cpu, tuple(rows), lost)

    def show(self) -> None:
        """Print the report."""
        kind = "process" if self.processes == 1 else "processes, the busiest"
        load = f"load from {self.processes} {kind} using {self.generator_cpu:.0%} of a core"
        print(f"\n{self.scenario} loop, {self.seconds:.1f} s, {load}")
        shown = list[Sequence[object]]()
        for row in self.rows:
            target = ["", ""]
            if row.target_per_s is not None and row.achieved_ratio is not None:
                target = [f"{row.target_per_s:.1f}", f"{row.achieved_ratio:.3f}"]
            counts = row.requests, row.failed, f"{row.rate_per_s:.1f}", *target, row.backlog_max
            shown.append((row.protocol, *counts, "response ms", *_cells(row.response_ms)))
            shown.append((*[""] * 7, "service ms", *_cells(row.service_ms)))
        record.show(HEADINGS, shown, width=130)
        for row in self.rows:
            for reason, times in sorted(row.failures.items(), key=lambda item: -item[1]):
                print(f"{row.protocol}: {times} × {reason}")


def _row(protocol: str, series: ProtocolStatistics, statistics: RunStatistics) -> Row:
    rate = series.good / statistics.seconds if statistics.seconds else 0.0
    target = series.planned / statistics.schedule_s if series.planned else None
    return Row(
        protocol=protocol,
        requests=series.requests,
        failures=dict(series.failures),
        rate_per_s=round(rate, 2),
        target_per_s=None if target is None else round(target, 2),
        achieved_ratio=None if target is None else round(rate / target, 4),
        backlog_max=series.backlog_max,
        in_flight_max=series.in_flight_max,
        response_ms=_percentiles(series.response),
        service_ms=_percentiles(series.service),
    )


def _percentiles(histogram: Histogram) -> dict[str, float]:
    return {name: round(histogram.percentile_ms(percent), 2) for name, percent in PERCENTILES.items()}


def _cells(latencies: Mapping[str, float]) -> list[str]:
    return [f"{value:.1f}" for value in latencies.values()]

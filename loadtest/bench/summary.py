"""The arithmetic: spreads over rounds, ratios within a round, and what was asked for against what came."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from loadtest.bench.plan import BOTH_BY_ONE, LIMITS, TWICE, WRK, Cell
from loadtest.bench.sample import Sample

# A sample per round; all cells of a run were measured in the same rounds.
Series = Mapping[Cell, Sequence[Sample]]
Row = dict[str, Any]

HEADINGS = (
    *("path", "photo", "precision", "load", "images/s", "least..most", "of the limit", "p50 ms", "p90 ms"),
    *("p99 ms", "p99 of even", "CPU ms", "of the limit's", "memory MB"),
)
# Asked for by the throughput of the limit, at the best concurrency.
SATURATING = 8
LEAST_RATE = {"ensemble": 0.90, "cpu": 0.97}
MOST_CPU = 1.03
# By concurrency: `Sample.slack`.
MOST_P99 = {8: 1.6, 32: 1.25}
MOST_P50 = 1.15
LEAST_INT8 = 1.6
# What the same measured twice may differ by.
TOLERABLE = 0.05
# From its least to its most; the median alone is 1 also where half of the rounds gave half, and half twice.
MOST_SPREAD = 0.5
BETWEEN_PROTOCOLS = 0.95, 1.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target: the median over rounds against what was asked for."""

    what: str
    got: float
    least: float | None = None
    most: float | None = None

    @property
    def is_met(self) -> bool:
        """Tell whether it lies within."""
        return (self.least is None or self.got >= self.least) and (self.most is None or self.got <= self.most)

    @property
    def wanted(self) -> str:
        """What was asked for, in words."""
        bounds = (("≥", self.least), ("≤", self.most))
        return " and ".join(f"{sign} {bound:.2f}" for sign, bound in bounds if bound is not None)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return median, least and most."""
    found = sorted(values)
    return {
        "median": round(statistics.median(found), 3),
        "min": round(found[0], 3),
        "max": round(found[-1], 3),
    }


def ratios(series: Series, cell: Cell, base: Cell, name: str) -> list[float]:
    """Return a cell's number by another's, round by round: a slow phase of the machine hits both alike."""
    pairs = zip(series[cell], series[base], strict=True)
    return [getattr(sample, name) / getattr(other, name) for sample, other in pairs]


def rows(series: Series) -> list[Row]:
    """Return a row per cell: spreads of what was measured, and of its ratios to the limit."""
    return [_row(series, cell) for cell in series]


def _row(series: Series, cell: Cell) -> Row:
    names = Sample.__dataclass_fields__
    row: Row = asdict(cell) | {
        name: spread(getattr(sample, name) for sample in series[cell]) for name in names
    }
    if cell.path not in LIMITS:
        row["p99_of_even"] = spread(each.slack(cell.concurrency) for each in series[cell])
    if cell.limit in series and cell != cell.limit:
        row["of_limit"] = spread(ratios(series, cell, cell.limit, "rate"))
        row["cpu_of_limit"] = spread(ratios(series, cell, cell.limit, "cpu_ms"))
    if cell.alone in series and cell.concurrency == 1 and cell != cell.alone:
        row["p50_of_alone"] = spread(ratios(series, cell, cell.alone, "p50_ms"))
    return row


def cell_of(row: Row) -> Cell:
    """Return the cell that a row is of."""
    return Cell(**{field.name: row[field.name] for field in fields(Cell)})


def plain(found: Iterable[Row]) -> list[Row]:
    """Return the rows of plain cells."""
    return [row for row in found if cell_of(row).is_plain]


def cells(row: Row) -> list[str]:
    """Return a row as text, under HEADINGS, for a terminal and the page alike."""

    def told(name: str, digits: int) -> str:
        return f"{row[name]['median']:.{digits}f}" if name in row else ""

    return [
        *(row["path"], row["photo"], row["precision"], cell_of(row).load),
        told("rate", 1),
        f"{row['rate']['min']:.1f}..{row['rate']['max']:.1f}",
        told("of_limit", 3),
        *(told(name, 1) for name in ("p50_ms", "p90_ms", "p99_ms")),
        *(told("p99_of_even", 2), told("cpu_ms", 2), told("cpu_of_limit", 3), told("memory_mb", 0)),
    ]


def best(found: Sequence[Row]) -> Row:
    """Return the row with the most of its limit; where all cores are asked for, if there is one."""
    saturating = [row for row in found if row["concurrency"] >= SATURATING]
    return max(saturating or found, key=lambda row: float(row["of_limit"]["median"]))


def noise(series: Series) -> Row | None:
    """Return what the same cell, measured twice per round, gave by itself; None if it was not measured."""
    again = replace(TWICE, again=True)
    if again not in series:
        return None
    names = ("rate", "p50_ms", "p99_ms", "cpu_ms")
    return {name: spread(ratios(series, again, TWICE, name)) for name in names}


def warning(found: Row | None) -> list[str]:
    """Tell where a run was too noisy to judge by, as its A/A measurement has it."""
    if found is None:
        return []
    middle, low, high = (found["rate"][name] for name in ("median", "min", "max"))
    if abs(middle - 1) <= TOLERABLE and high - low <= MOST_SPREAD:
        return []
    told = f"the same, measured twice per round, gave {middle} times itself ({low}..{high})"
    return [f"the machine was not quiet: {told}, so judge nothing by this run"]


def verdicts(series: Series) -> list[Verdict]:
    """Hold what was measured to what was asked for; what was not measured is not judged."""
    return [*_throughput(series), *_latency(series), *_between(series)]


def _judged(series: Series, path: str, concurrency: int | None = None) -> dict[str, list[Cell]]:
    """Return the FP32 cells of a path over HTTP by their photo."""
    found: dict[str, list[Cell]] = {}
    for cell in series:
        if cell.is_plain and cell.path == path and concurrency in (None, cell.concurrency):
            found.setdefault(cell.photo, []).append(cell)
    return found


def _throughput(series: Series) -> Iterable[Verdict]:
    for path, least in LEAST_RATE.items():
        for photo, cells in _judged(series, path).items():
            rates = {
                cell: statistics.median(ratios(series, cell, cell.limit, "rate"))
                for cell in cells
                if cell.concurrency >= SATURATING
            }
            if not rates:
                continue
            best = max(rates, key=rates.__getitem__)
            at = f"{path}, {photo}, concurrency {best.concurrency}"
            yield Verdict(f"{at}: throughput, of the limit", rates[best], least=least)
            if path == "cpu":
                cpu = statistics.median(ratios(series, best, best.limit, "cpu_ms"))
                yield Verdict(f"{at}: CPU per image, of the limit's", cpu, most=MOST_CPU)


def _latency(series: Series) -> Iterable[Verdict]:
    for concurrency, most in MOST_P99.items():
        for photo, (cell,) in _judged(series, "cpu", concurrency).items():
            what = f"cpu, {photo}, concurrency {concurrency}: p99, of concurrency / throughput"
            slack = statistics.median(each.slack(concurrency) for each in series[cell])
            yield Verdict(what, slack, most=most)
    for photo, (cell,) in _judged(series, "cpu", 1).items():
        p50 = statistics.median(ratios(series, cell, cell.alone, "p50_ms"))
        yield Verdict(f"cpu, {photo}, concurrency 1: p50, of that in process", p50, most=MOST_P50)


def _between(series: Series) -> Iterable[Verdict]:
    """Compare what saturates `cpu` with the same at another precision, and by another protocol."""
    generator, protocol = BOTH_BY_ONE
    for cell in series:
        if (cell.path, cell.concurrency) != (TWICE.path, TWICE.concurrency):
            continue
        at = f"cpu, {cell.photo}, concurrency {cell.concurrency}: throughput of"
        plain = replace(cell, precision="fp32")
        if cell.precision == "int8" and cell.photo == "small" and cell.generator == WRK and plain in series:
            faster = statistics.median(ratios(series, cell, plain, "rate"))
            yield Verdict(f"{at} INT8, of FP32's", faster, least=LEAST_INT8)
        http = replace(cell, generator=generator, protocol=protocol)
        if cell == plain and cell.protocol == "grpc" and http in series:
            by_http = statistics.median(ratios(series, cell, http, "rate"))
            yield Verdict(f"{at} gRPC, of HTTP's", by_http, *BETWEEN_PROTOCOLS)

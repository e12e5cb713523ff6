"""The arithmetic of the benchmark: ranges over rounds, ratios within a round, and targets."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from loadtest.bench.plan import BY_HAND, LIMITS, TWICE, Cell
from loadtest.record import Row, spread

HEADINGS = (
    *("path", "photo", "precision", "load", "images/s", "min..max", "of the limit", "p50 ms", "p90 ms"),
    *("p99 ms", "p99 of even", "CPU ms", "of the limit's", "memory MB"),
)
# Concurrencies from this one on can use all cores; throughput is judged at the best of them.
SATURATING = 8
# Shares of the limit's throughput and CPU time.
MIN_RATE = {"ensemble": 0.90, "cpu": 0.97}
MAX_CPU = 1.03
# `Sample.slack` by concurrency, and p50 as a share of that in process.
MAX_P99 = {8: 1.6, 32: 1.25}
MAX_P50 = 1.15
MIN_INT8 = 1.6
# The limit on the A/A ratio's distance from 1, and on its range over the rounds. The median alone is 1
# even if half of the rounds gave half, and the others twice.
MAX_NOISE, MAX_SPREAD = 0.05, 0.5
# Requests in flight, the measure, and the limits of `cpu` as a multiple of the service by hand.
BESIDE_BY_HAND = (
    (32, "rate", "throughput", 1.0, None),
    (1, "p50_ms", "p50", None, 1.05),
    (1, "p99_ms", "p99", None, 1.1),
    (8, "p99_ms", "p99", None, 0.9),
    (32, "p99_ms", "p99", None, 0.9),
    (32, "memory_mb", "memory", None, 1.0),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of a cell in one round.

    `cpu_ms` is CPU time per image and `memory_mb` the memory (PSS) of the measured processes, without those
    of the load generator.
    """

    rate: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    cpu_ms: float
    memory_mb: float

    def slack(self, concurrency: int) -> float:
        """Return p99 as a multiple of the even latency, which is concurrency / throughput."""
        return self.p99_ms / 1e3 * self.rate / concurrency


# One sample per round; all cells were measured in the same rounds.
Series = Mapping[Cell, Sequence[Sample]]


def _target(what: str, got: float, low: float | None = None, high: float | None = None) -> Row:
    """Return the row of a target: the median over rounds, and its limits."""
    bounds = [(sign, bound) for sign, bound in (("≥", low), ("≤", high)) if bound is not None]
    is_met = (low is None or got >= low) and (high is None or got <= high)
    limits = " and ".join(f"{sign} {bound:.2f}" for sign, bound in bounds)
    return {"what": what, "got": round(got, 3), "wanted": limits, "met": is_met}


def ratios(series: Series, cell: Cell, base: Cell, name: str) -> list[float]:
    """Return the ratios of a cell to another, round by round."""
    pairs = zip(series[cell], series[base], strict=True)
    return [getattr(sample, name) / getattr(other, name) for sample, other in pairs]


def _ratio(series: Series, cell: Cell, base: Cell, name: str) -> float:
    return statistics.median(ratios(series, cell, base, name))


def row_of(series: Series, cell: Cell) -> Row:
    """Return the row of a cell: ranges of the samples, and of their ratios to the limit."""
    row: Row = asdict(cell) | {
        field.name: spread(getattr(sample, field.name) for sample in series[cell]) for field in fields(Sample)
    }
    if cell.path not in LIMITS:
        row["p99_of_even"] = spread(sample.slack(cell.concurrency) for sample in series[cell])
    if cell.limit in series and cell != cell.limit:
        row["of_limit"] = spread(ratios(series, cell, cell.limit, "rate"))
        row["cpu_of_limit"] = spread(ratios(series, cell, cell.limit, "cpu_ms"))
    if cell.alone in series and cell.concurrency == 1 and cell != cell.alone:
        row["p50_of_alone"] = spread(ratios(series, cell, cell.alone, "p50_ms"))
    return row


def cell_of(row: Row) -> Cell:
    """Return the cell of a row."""
    return Cell(**{field.name: row[field.name] for field in fields(Cell)})


def cells(row: Row) -> list[str]:
    """Return a row as text, under HEADINGS."""

    def shown(name: str, digits: int) -> str:
        return f"{row[name]['median']:.{digits}f}" if name in row else ""

    return [
        *(row["path"], row["photo"], row["precision"], cell_of(row).load),
        shown("rate", 1),
        f"{row['rate']['min']:.1f}..{row['rate']['max']:.1f}",
        shown("of_limit", 3),
        *(shown(name, 1) for name in ("p50_ms", "p90_ms", "p99_ms")),
        *(shown("p99_of_even", 2), shown("cpu_ms", 2), shown("cpu_of_limit", 3), shown("memory_mb", 0)),
    ]


def best(found: Sequence[Row]) -> Row:
    """Return the row with the largest share of its limit, at a saturating concurrency if there is one."""
    saturating = [row for row in found if row["concurrency"] >= SATURATING]
    return max(saturating or found, key=lambda row: float(row["of_limit"]["median"]))


def noise(series: Series) -> Row | None:
    """Return the A/A ratios of the cell that is measured twice; None if it was not measured."""
    again = replace(TWICE, again=True)
    if again not in series:
        return None
    names = ("rate", "p50_ms", "p99_ms", "cpu_ms")
    return {name: spread(ratios(series, again, TWICE, name)) for name in names}


def warning(found: Row | None) -> list[str]:
    """Return a note if the A/A measurement shows too much noise."""
    if found is None:
        return []
    middle, low, high = (found["rate"][name] for name in ("median", "min", "max"))
    if abs(middle - 1) <= MAX_NOISE and high - low <= MAX_SPREAD:
        return []
    return [f"the machine was not quiet: the A/A ratio was {middle} ({low}..{high}), so this run is invalid"]


def targets(series: Series) -> list[Row]:
    """Compare the measured cells with their targets."""
    return [*_throughput(series), *_latency(series), *_of_int8(series), *_beside_by_hand(series)]


def _judged(series: Series, path: str, concurrency: int | None = None) -> dict[str, list[Cell]]:
    """Return the FP32 cells of a path over HTTP, by photo."""
    groups: dict[str, list[Cell]] = {}
    for cell in series:
        if cell.is_plain and cell.path == path and concurrency in (None, cell.concurrency):
            groups.setdefault(cell.photo, []).append(cell)
    return groups


def _throughput(series: Series) -> Iterable[Row]:
    for path, limit in MIN_RATE.items():
        for photo, group in _judged(series, path).items():
            rates = {
                cell: _ratio(series, cell, cell.limit, "rate")
                for cell in group
                if cell.concurrency >= SATURATING
            }
            if not rates:
                continue
            best = max(rates, key=rates.__getitem__)
            at = f"{path}, {photo}, concurrency {best.concurrency}"
            yield _target(f"{at}: throughput, of the limit", rates[best], low=limit)
            if path == "cpu":
                cpu = _ratio(series, best, best.limit, "cpu_ms")
                yield _target(f"{at}: CPU per image, of the limit's", cpu, high=MAX_CPU)


def _latency(series: Series) -> Iterable[Row]:
    for concurrency, limit in MAX_P99.items():
        for photo, (cell,) in _judged(series, "cpu", concurrency).items():
            name = f"cpu, {photo}, concurrency {concurrency}: p99, of concurrency / throughput"
            slack = statistics.median(sample.slack(concurrency) for sample in series[cell])
            yield _target(name, slack, high=limit)
    for photo, (cell,) in _judged(series, "cpu", 1).items():
        p50 = _ratio(series, cell, cell.alone, "p50_ms")
        yield _target(f"cpu, {photo}, concurrency 1: p50, of that in process", p50, high=MAX_P50)


def _beside_by_hand(series: Series) -> Iterable[Row]:
    """Compare `cpu` with the same service by hand."""
    for concurrency, measure, name, low, high in BESIDE_BY_HAND:
        for photo, (cell,) in _judged(series, "cpu", concurrency).items():
            peer = replace(cell, path=BY_HAND)
            if peer in series:
                got = _ratio(series, cell, peer, measure)
                what = f"cpu, {photo}, concurrency {concurrency}: {name}, of the service by hand"
                yield _target(what, got, low, high)


def _of_int8(series: Series) -> Iterable[Row]:
    """Compare the saturated `cpu` path in INT8 with FP32."""
    int8 = replace(TWICE, precision="int8")
    if int8 in series and TWICE in series:
        name = f"cpu, small, concurrency {TWICE.concurrency}: throughput of INT8, of FP32's"
        yield _target(name, _ratio(series, int8, TWICE, "rate"), low=MIN_INT8)

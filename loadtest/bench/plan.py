"""The plan of a run: the measured cells, from a selection."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from nereid.base.processes import available_cores
from nereid.insight.tune import photos, tuning

# Paths of a request to the network. All but `network` take a photo.
BY_HAND = "by-hand"
PATHS = ("cpu", "ensemble", BY_HAND, "route", "gateway", "network")
PHOTOS = dict(zip(("small", "1080p"), photos.SIZES_WH, strict=True))
PRECISIONS = {"fp32": 1, "int8": 2}
CONCURRENCIES = (32, 8, 1)
WRK = "wrk"
TENSOR = "tensor"
BATCH = 8
IN_PROCESS, ALONE = "in process", "in process, one core"
BATCHES = f"in process, batches of {BATCH}"
LIMITS = (IN_PROCESS, BATCHES, ALONE)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement of each round; `again` marks the A/A measurement.

    Older records have a second generator, for gRPC.
    """

    path: str
    photo: str
    precision: str
    generator: str = ""
    protocol: str = ""
    concurrency: int = 1
    again: bool = False

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.path, self.photo, self.precision, self.load)))

    @property
    def load(self) -> str:
        """Generator, protocol and requests in flight; empty for work in process."""
        if not self.generator:
            return ""
        return f"{self.generator} {self.protocol} {self.concurrency}" + " again" * self.again

    @property
    def is_plain(self) -> bool:
        """Whether targets and README use the cell: FP32, in process or by `wrk`, not again."""
        return (self.precision, self.again) == ("fp32", False) and self.generator in ("", WRK)

    @property
    def limit(self) -> "Cell":
        """The base of its throughput: the same work in process, on every core."""
        return Cell(IN_PROCESS, self.photo, self.precision, concurrency=available_cores())

    @property
    def alone(self) -> "Cell":
        """The base of its latency: the same work in process, on one core."""
        return Cell(ALONE, self.photo, self.precision)


# The cell that is measured twice in every round.
TWICE = Cell("cpu", "small", "fp32", WRK, "http", 32)


def select(paths: str | None = None, photos: str | None = None, concurrency: str | None = None) -> list[Cell]:
    """Return the cells of a round, from lists with commas; the limits of a photo precede its cells.

    Raises:
        ValueError: a name is unknown, or the selection is empty.
    """
    chosen = _choose("path", paths, PATHS), (*_choose("photo", photos, PHOTOS), TENSOR)
    counts = tuning.concurrencies(concurrency) if concurrency else CONCURRENCIES
    served = [
        cell
        for cell in _served()
        if cell.path in chosen[0] and cell.photo in chosen[1] and cell.concurrency in counts
    ]
    if not served:
        raise ValueError("nothing to measure: no cell has all of the options")
    cells: list[Cell] = []
    for photo, precision in dict.fromkeys((cell.photo, cell.precision) for cell in served):
        group = [cell for cell in served if (cell.photo, cell.precision) == (photo, precision)]
        cells += [*_limits(group), *group]
        if TWICE in group:
            cells.append(replace(TWICE, again=True))
    return cells


def _served() -> Iterator[Cell]:
    """Yield the cells with a target or a place on a page; INT8 only on `cpu` at saturation."""
    for photo, concurrency in product(PHOTOS, CONCURRENCIES):
        is_end = photo == "small" and concurrency in (1, max(CONCURRENCIES))
        for path in ("cpu", "ensemble", BY_HAND, *(("route", "gateway") if is_end else ())):
            yield Cell(path, photo, "fp32", WRK, "http", concurrency)
    for concurrency in CONCURRENCIES:
        yield Cell("network", TENSOR, "fp32", WRK, "http", concurrency)
    yield replace(TWICE, precision="int8")


def _limits(group: Sequence[Cell]) -> list[Cell]:
    """Return the bases of the cells of one photo and precision."""
    first = group[0]
    cells = [first.limit]
    if first.photo != TENSOR:
        cells.append(replace(first.limit, path=BATCHES))
    if any(cell.concurrency == 1 for cell in group):
        cells.append(first.alone)
    return cells


def _choose(kind: str, text: str | None, known: Collection[str]) -> tuple[str, ...]:
    names = tuple(known) if text is None else tuple(dict.fromkeys(map(str.strip, text.split(","))))
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {kind} '{name}', expected one of {', '.join(known)}")
    return names

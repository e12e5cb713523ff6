"""The plan of a run: the measured cells, from a selection."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from nereid.processes import available_cores
from nereid.tune import photos, tuning

# Paths of a request to the network. All but `network` take a photo.
BY_HAND = "by-hand"
PATHS = ("cpu", "ensemble", BY_HAND, "route", "gateway", "network")
PHOTOS = dict(zip(("small", "1080p"), photos.SIZES_WH, strict=True))
PRECISIONS = {"fp32": 1, "int8": 2}
CONCURRENCIES = (32, 8, 1)
PROTOCOLS = ("http", "grpc")
WRK, PERF_ANALYZER = "wrk", "perf_analyzer"
# gRPC is compared with HTTP by perf_analyzer, which supports both.
GENERATORS = {"http": (WRK, "http"), "grpc": (PERF_ANALYZER, "grpc")}
BOTH_BY_ONE = (PERF_ANALYZER, "http")
TENSOR = "tensor"
BATCH = 8
IN_PROCESS, ALONE = "in process", "in process, one core"
BATCHES = f"in process, batches of {BATCH}"
LIMITS = (IN_PROCESS, BATCHES, ALONE)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement of each round; `again` marks the A/A measurement."""

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
        """Whether targets, plots and README use the cell: FP32, in process or by `wrk`, not again."""
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


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen paths, photos and so on; None selects the cells that have a target."""

    paths: tuple[str, ...] | None = None
    photos: tuple[str, ...] | None = None
    precisions: tuple[str, ...] | None = None
    concurrencies: tuple[int, ...] | None = None
    protocols: tuple[str, ...] | None = None

    def cells(self) -> list[Cell]:
        """Return the cells of a round; the limits of a photo precede its cells.

        Raises:
            ValueError: the selection is empty.
        """
        served = [cell for cell in self._all() if self._is_wanted(cell)]
        if not served:
            raise ValueError("nothing to measure: gRPC needs the path cpu or ensemble")
        found: list[Cell] = []
        for photo, precision in dict.fromkeys((cell.photo, cell.precision) for cell in served):
            group = [cell for cell in served if (cell.photo, cell.precision) == (photo, precision)]
            found += [*limits(group), *group]
            if TWICE in group:
                found.append(replace(TWICE, again=True))
        return found

    def _all(self) -> Iterator[Cell]:
        protocols = self.protocols or PROTOCOLS
        generators = [GENERATORS[protocol] for protocol in protocols]
        if set(PROTOCOLS) <= set(protocols):
            generators.append(BOTH_BY_ONE)
        for photo, precision, concurrency, (generator, protocol), path in product(
            (*(self.photos or PHOTOS), TENSOR),
            self.precisions or PRECISIONS,
            self.concurrencies or CONCURRENCIES,
            generators,
            self.paths or PATHS,
        ):
            if (path == "network") == (photo == TENSOR):
                yield Cell(path, photo, precision, generator, protocol, concurrency)

    def _is_wanted(self, cell: Cell) -> bool:
        """Check whether a cell can be measured, and is chosen or has a target."""
        if cell.generator == PERF_ANALYZER and cell.path not in ("cpu", "ensemble"):
            return False
        plain = cell.path == "cpu" and cell.concurrency == max(CONCURRENCIES)
        return (
            (bool(self.precisions) or cell.precision == "fp32" or (plain and cell.photo == "small"))
            and (bool(self.protocols) or cell.generator == WRK or plain)
            and (not (cell.precision == "int8" and cell.generator != WRK) or bool(self.protocols))
            and (bool(self.paths) or cell.path not in ("route", "gateway") or _is_end(cell))
        )


def _is_end(cell: Cell) -> bool:
    return cell.photo == "small" and cell.concurrency in (1, max(CONCURRENCIES))


def limits(group: Sequence[Cell]) -> list[Cell]:
    """Return the bases of the cells of one photo and precision."""
    first = group[0]
    found = [first.limit]
    if first.photo != TENSOR:
        found.append(replace(first.limit, path=BATCHES))
    if any(cell.concurrency == 1 for cell in group):
        found.append(first.alone)
    return found


def select(
    paths: str | None,
    photos: str | None,
    precisions: str | None,
    concurrency: str | None,
    protocols: str | None,
) -> Selection:
    """Parse lists with commas; None stays None.

    Raises:
        ValueError: a name is unknown.
    """
    return Selection(
        _choose("path", paths, PATHS),
        _choose("photo", photos, tuple(PHOTOS)),
        _choose("precision", precisions, tuple(PRECISIONS)),
        tuning.concurrencies(concurrency),
        _choose("protocol", protocols, PROTOCOLS),
    )


def _choose(kind: str, text: str | None, known: Sequence[str]) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {kind} '{name}', expected one of {', '.join(known)}")
    return names

"""A run of the benchmark: servers, rounds over all cells, and the report."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from loadtest import record, wrk
from loadtest.bench import limit, paths, summary
from loadtest.bench.plan import LIMITS, Cell
from loadtest.bench.summary import Sample
from nereid.base.errors import OperationFailed, ServerError
from nereid.base.processes import exit_on_sigterm
from nereid.insight.tune.load_generator import LoadFailed
from nereid.server.command_line import KEEP_BUFFERS

Environment = MutableMapping[str, str]


def bench(cells: Sequence[Cell], rounds: int, seconds: float, environment: Environment) -> dict[str, Any]:
    """Measure cells in some rounds, each for some seconds; returns the result for the record.

    Args:
        environment: of this process, which its children inherit.

    Raises:
        OperationFailed: a measurement failed; the message names the place.
    """
    size = f"{len(cells)} measurements of {seconds:g} s in each of {rounds} rounds"
    print("\n  ".join([size, *map(str, cells)]), file=sys.stderr)
    load_before = os.getloadavg()[0]
    with exit_on_sigterm(), _failures_named():
        series = _measure(cells, rounds, seconds, environment)
    noise = summary.noise(series)
    return {
        "rounds": rounds,
        "seconds": seconds,
        "environment": {name: environment.get(name, value) for name, value in KEEP_BUFFERS.items()},
        "tools": {"wrk": wrk.version()},
        "load_before": round(load_before, 2),
        "notes": summary.warning(noise),
        "rows": [summary.row_of(series, cell) for cell in series],
        "noise": noise,
        "targets": summary.targets(series),
    }


@contextlib.contextmanager
def _failures_named(where: str = "") -> Iterator[None]:
    """Turn errors into `OperationFailed` with the place where they happened."""
    prefix = f"{where}: " if where else ""
    try:
        yield
    except subprocess.CalledProcessError as error:
        raise OperationFailed(f"{prefix}{error.cmd[0]} failed: {error.stderr or error}") from None
    except (ServerError, LoadFailed, OSError) as error:
        raise OperationFailed(f"{prefix}{error}") from None


def _measure(
    cells: Sequence[Cell], rounds: int, seconds: float, environment: Environment
) -> dict[Cell, list[Sample]]:
    series: dict[Cell, list[Sample]] = {cell: [] for cell in cells}
    with (
        tempfile.TemporaryDirectory() as scratch,
        limit.pool(environment) as workers,
        paths.serving(Path(scratch), environment, cells) as served,
    ):
        for number in range(rounds):
            for cell in record.turns(cells, number):
                with _failures_named(f"round {number + 1}, {cell}"):
                    if cell.path in LIMITS:
                        sample = limit.measure(workers, cell, seconds)
                    else:
                        sample = served.measure(cell, seconds)
                series[cell].append(sample)
            print(f"round {number + 1} of {rounds} measured", file=sys.stderr)
    return series


def show(result: dict[str, Any]) -> None:
    """Print a result."""
    record.show(summary.HEADINGS, map(summary.cells, result["rows"]), width=180)
    for name, values in (result["noise"] or {}).items():
        print(f"A/A ratio of {name}: {values['median']} ({values['min']}..{values['max']})")
    print(*result["notes"], sep="\n", end="\n" * bool(result["notes"]))
    for target in result["targets"]:
        missed = "" if target["met"] else " (missed)"
        print(f"{target['what']}. Target: {target['wanted']}. Measured: {target['got']}{missed}.")

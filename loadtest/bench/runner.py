"""A run of the benchmark: servers, rounds over all cells, and the report."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from loadtest import record, wrk
from loadtest.bench import limit, paths, summary
from loadtest.bench.plan import LIMITS, Cell, Selection
from loadtest.bench.summary import Sample
from nereid.errors import OperationFailed, ServerError, WrongUsage
from nereid.processes import exit_on_sigterm
from nereid.server.command_line import KEEP_BUFFERS
from nereid.tune.load_generator import LoadFailed

Environment = MutableMapping[str, str]


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a run; `record` names a file in loadtest/results/ or is empty."""

    selection: Selection
    rounds: int = 7
    seconds: float = 2.0
    record: str = ""
    as_json: bool = False


def bench(options: Options, environment: Environment) -> bool:
    """Measure, print and record; returns whether all measured targets are met.

    Args:
        environment: of this process, which its children inherit.

    Raises:
        WrongUsage: the options select nothing.
        OperationFailed: a tool is missing, or a measurement failed; the message names the place.
    """
    if not wrk.is_installed():
        raise OperationFailed(wrk.MISSING)
    run = record.begin(options.record)
    try:
        cells = options.selection.cells()
    except ValueError as error:
        raise WrongUsage(str(error)) from None
    size = f"{len(cells)} measurements of {options.seconds:g} s in each of {options.rounds} rounds"
    print("\n  ".join([size, *map(str, cells)]), file=sys.stderr)
    load_before = os.getloadavg()[0]
    with exit_on_sigterm(), _failures_named():
        series = _measure(cells, options, environment)
    result = {
        **_conditions(options, environment),
        "tools": {"wrk": wrk.version()},
        "load_before": round(load_before, 2),
        **_report(series),
    }
    run.write(result)
    _show(run, result, options.as_json)
    return all(target["met"] for target in result["targets"])


@contextlib.contextmanager
def _failures_named(where: str = "") -> Iterator[None]:
    """Turn errors into `OperationFailed` with the place where they happened."""
    place = f"{where}: " if where else ""
    try:
        yield
    except subprocess.CalledProcessError as error:
        raise OperationFailed(f"{place}{error.cmd[0]} failed: {error.stderr or error}") from None
    except (ServerError, LoadFailed, psutil.Error, OSError) as error:
        raise OperationFailed(f"{place}{error}") from None


def _measure(cells: Sequence[Cell], options: Options, environment: Environment) -> dict[Cell, list[Sample]]:
    series: dict[Cell, list[Sample]] = {cell: [] for cell in cells}
    with (
        tempfile.TemporaryDirectory() as scratch,
        limit.pool(environment) as workers,
        paths.serving(Path(scratch), environment, cells) as served,
    ):
        for number in range(options.rounds):
            for cell in record.turns(cells, number):
                with _failures_named(f"round {number + 1}, {cell}"):
                    if cell.path in LIMITS:
                        sample = limit.measure(workers, cell, options.seconds)
                    else:
                        sample = served.measure(cell, options.seconds)
                series[cell].append(sample)
            print(f"round {number + 1} of {options.rounds} measured", file=sys.stderr)
    return series


def _conditions(options: Options, environment: Environment) -> dict[str, Any]:
    malloc = {name: environment.get(name, value) for name, value in KEEP_BUFFERS.items()}
    return {"rounds": options.rounds, "seconds": options.seconds, "environment": malloc}


def _report(series: dict[Cell, list[Sample]]) -> dict[str, Any]:
    noise = summary.noise(series)
    return {
        "notes": summary.warning(noise),
        "rows": summary.rows(series),
        "noise": noise,
        "targets": [
            {"what": each.name, "got": round(each.measured, 3), "wanted": each.wanted, "met": each.is_met}
            for each in summary.targets(series)
        ],
    }


def _show(run: record.Run, result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({**run.header, **result}, indent=2))
        return
    record.show(summary.HEADINGS, map(summary.cells, result["rows"]), width=180)
    for name, values in (result["noise"] or {}).items():
        print(f"A/A ratio of {name}: {values['median']} ({values['min']}..{values['max']})")
    print(*result["notes"], sep="\n", end="\n" * bool(result["notes"]))
    for target in result["targets"]:
        missed = "" if target["met"] else " (missed)"
        print(f"{target['what']}. Target: {target['wanted']}. Measured: {target['got']}{missed}.")

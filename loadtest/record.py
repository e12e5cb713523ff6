"""The shared parts of all measurements: command line, rounds, tables, and the header of each record.

A number without its conditions is not published.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import platform
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rich.console import Console
from rich.table import Table

from nereid.base.errors import WrongUsage
from nereid.base.processes import available_cores, cpu_model, exit_on_sigterm

T = TypeVar("T")
Row = dict[str, Any]
# A format of a row's fields, or a function of a row, by heading.
Columns = Mapping[str, str | Callable[[Row], object]]

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
# They compute on a CPU or GPU, or are compared with what does.
PACKAGES = re.compile(
    r"(cupy-cuda\d+x|nvidia-.*|cuda-.*|cupti-python|onnxruntime.*|onnx|tensorrt.*|torch|numpy|pillow|simplejpeg)$",
    re.IGNORECASE,
)
UNCOMMITTED = "a record needs a commit to refer to; fix: commit the changes first"


@dataclass(frozen=True, slots=True)
class Run:
    """A measurement and the conditions at its start; it is recorded only if it has a name."""

    name: str
    header: Mapping[str, Any]

    def write(self, result: Mapping[str, Any]) -> None:
        """Store header and `result` as `loadtest/results/NAME.json`."""
        if self.name:
            RESULTS.mkdir(exist_ok=True)
            text = json.dumps({**self.header, **result}, indent=2)
            (RESULTS / f"{self.name}.json").write_text(f"{text}\n")


def begin(name: str = "") -> Run:
    """Start a measurement, which is recorded if `name` is not empty.

    Raises:
        WrongUsage: a record has no commit to refer to.
    """
    if name and not is_committed():
        raise WrongUsage(UNCOMMITTED)
    return Run(name, header())


def parser(doc: str, **defaults: float) -> argparse.ArgumentParser:
    """Return a measurement's command line: an option for each of `defaults`, and `--record`."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in defaults.items():
        words = name.replace("_", "-")
        made.add_argument(f"--{words}", type=type(default), default=default, help=f"default: {default:g}")
    made.add_argument("--record", default="", help="store the result as loadtest/results/NAME.json")
    return made


def positive(text: str) -> float:
    """Read an option that must be more than 0.

    Raises:
        ArgumentTypeError: it is not.
    """
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected more than 0, got {text}")
    return value


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line; `record` of the result is the `Run` that begins now."""
    args = made.parse_args()
    try:
        args.record = begin(args.record)
    except WrongUsage as error:
        made.error(str(error))
    return args


def finish(run: Run, result: Mapping[str, Any], missed: Iterable[str] = ()) -> int:
    """Write the record and print the missed targets; returns the exit status."""
    run.write(result)
    lines = [f"target missed: {target}" for target in missed]
    print(*lines, sep="\n", end="\n" if lines else "", file=sys.stderr)
    return int(bool(lines))


def end(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and exit with its result; a SIGTERM leaves no process and no file."""
    with exit_on_sigterm():
        sys.exit(main())


def header() -> dict[str, Any]:
    """Return date, command, commit, machine and versions of this run."""
    spec, commit = sys.modules["__main__"].__spec__, _git("rev-parse", "--short", "HEAD")
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([*program, *sys.argv[1:]]),
        "commit": commit if is_committed() or not commit else f"{commit}-dirty",
        "machine": machine(),
        "packages": packages(),
    }


def machine() -> dict[str, Any]:
    """Return processor, cores and Python version of this machine."""
    return {"cpu": cpu_model(), "cores": available_cores(), "python": platform.python_version()}


def packages() -> dict[str, str]:
    """Return the versions of the packages that determine the numbers."""
    versions = {package.name: package.version for package in importlib.metadata.distributions()}
    return {name: versions[name] for name in sorted(versions) if PACKAGES.match(name)}


def is_committed() -> bool:
    """Check whether the working tree equals a commit, so that a result can be reproduced.

    New records are allowed, because they do not change the measured code.
    """
    changes = _git("status", "--porcelain", "--", ":(top)", f":(exclude){RESULTS.name}")
    return _git("rev-parse", "--quiet", "--verify", "HEAD") != "" and changes == ""


def turns(measured: Iterable[T], number: int) -> list[T]:
    """Return the order of a round; odd rounds run backwards, so a slow drift affects all alike."""
    return list(measured)[:: -1 if number % 2 else 1]


def spread(values: Iterable[float], digits: int = 3) -> dict[str, float]:
    """Return the median, the smallest and the largest value."""
    ordered = sorted(values)
    named = {"median": statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}
    return {name: round(value, digits) for name, value in named.items()}


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios of each round, which a slow phase of the machine does not change."""
    return round(statistics.median(a / b for a, b in zip(values, base, strict=True)), 3)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Render a table for a page; a test compares the page with the record."""
    lines = [headings, ["---"] * len(headings), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(columns: Columns, rows: Iterable[Row]) -> str:
    """Render the rows of a record as a table for a page."""

    def cells(row: Row) -> list[object]:
        return [cell.format(**row) if isinstance(cell, str) else cell(row) for cell in columns.values()]

    return markdown([*columns], map(cells, rows))


def with_section(page: str, mark: str, section: str) -> str:
    """Return a page with the lines after a mark replaced, up to the end of their table.

    Raises:
        ValueError: the page has no such lines, or several.
    """
    pattern = "(?m)^" + re.escape(mark) + r"([^|]*\n\n)?(\|.*\n)+"
    replaced, count = re.subn(pattern, lambda _: mark + section, page)
    if count != 1:
        raise ValueError(f"expected 1 place for the table after {mark.strip()}, got {count}")
    return replaced


def show(headings: Sequence[str], rows: Iterable[Sequence[object]], width: int = 140) -> None:
    """Print a table on the terminal."""
    table = Table(*headings)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=width).print(table)


def _git(*words: str) -> str:
    if not shutil.which("git"):
        return ""
    return subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, text=True).stdout.strip()

"""What measurements share: their command line, and the header that every recorded result carries.

A number without its conditions is not published.
"""

import argparse
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from nereid import ending
from nereid.errors import WrongUsage
from nereid.processes import available_cores, cpu_model

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
PACKAGES = frozenset(
    {"nvidia-pytriton", "onnxruntime", "onnxruntime-gpu", "numpy", "Pillow", "pillow", "simplejpeg"}
)
UNCOMMITTED = "a record needs a commit to refer to; fix: commit the changes first"


@dataclass(frozen=True, slots=True)
class Run:
    """A measurement, with the conditions under which it began; recorded only if it has a name."""

    name: str
    header: Mapping[str, Any]

    def write(self, result: Mapping[str, Any]) -> None:
        """Store `result` behind the header as `loadtest/results/NAME.json`."""
        if self.name:
            RESULTS.mkdir(exist_ok=True)
            text = json.dumps({**self.header, **result}, indent=2)
            (RESULTS / f"{self.name}.json").write_text(f"{text}\n")


def begin(name: str = "") -> Run:
    """Begin what is to be recorded by that name, if it has one.

    Raises:
        WrongUsage: it has, but there is no commit that says what is measured.
    """
    if name and not is_committed():
        raise WrongUsage(UNCOMMITTED)
    return Run(name, header())


def parser(doc: str, **defaults: float) -> argparse.ArgumentParser:
    """Return a measurement's command line: what `defaults` names, each of its value's type, and `--record`.

    Args:
        doc: the module's, whose first line says what it is for.
    """
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in defaults.items():
        words = name.replace("_", "-")
        made.add_argument(f"--{words}", type=type(default), default=default, help=f"default: {default:g}")
    made.add_argument("--record", default="", help="store the result as loadtest/results/NAME.json")
    return made


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line; its `record` is the `Run` that begins now."""
    args = made.parse_args()
    try:
        args.record = begin(args.record)
    except WrongUsage as error:
        made.error(str(error))
    return args


def end(main: Callable[[], int | None]) -> NoReturn:
    """End the program with what `main` returns; a SIGTERM meanwhile leaves nothing behind."""
    with ending.tidy():
        sys.exit(main())


def header() -> dict[str, Any]:
    """Return machine, commit, versions, command and date of this run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([*_program(), *sys.argv[1:]]),
        "commit": _commit(),
        "machine": machine(),
        "packages": {d.name: d.version for d in importlib.metadata.distributions() if d.name in PACKAGES},
    }


def machine() -> dict[str, Any]:
    """Return what this machine is."""
    return {"cpu": cpu_model(), "cores": available_cores(), "python": platform.python_version()}


def is_committed() -> bool:
    """Tell whether the working tree is that of a commit, so that a result can be reproduced.

    Other records may have been written since: they change nothing that is measured.
    """
    changes = _git("status", "--porcelain", "--", ":(top)", f":(exclude){RESULTS.name}")
    return _git("rev-parse", "--quiet", "--verify", "HEAD") != "" and changes == ""


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Render a table for README or docs; a test compares it with the record."""
    lines = [headings, ["---"] * len(headings), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show(headings: Sequence[str], rows: Iterable[tuple[Sequence[str], Mapping[str, Any]]]) -> None:
    """Print rows of cells as a table, each with the range of its values."""
    table = Table(*headings, "min..max")
    for cells, row in rows:
        table.add_row(*cells, f"{row['min']}..{row['max']}")
    Console(width=110).print(table)


def _program() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return ["python", "-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]


def _commit() -> str:
    found = _git("rev-parse", "--short", "HEAD")
    return found if is_committed() or not found else f"{found}-dirty"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, text=True).stdout.strip()

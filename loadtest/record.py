"""The header every recorded result carries: a number without its conditions is not published."""

import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from python_backend.threads import available_cores

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
PACKAGES = frozenset(
    {"nvidia-pytriton", "onnxruntime", "onnxruntime-gpu", "numpy", "Pillow", "pillow", "simplejpeg"}
)


UNCOMMITTED = "a record needs a commit to refer to; mend: commit the changes first"


def header() -> dict[str, Any]:
    """Return machine, commit, versions, command and date of this run."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join([*_program(), *sys.argv[1:]]),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "machine": machine(),
        "packages": {d.name: d.version for d in importlib.metadata.distributions() if d.name in PACKAGES},
    }


def machine() -> dict[str, Any]:
    """Return what this machine is."""
    return {"cpu": _cpu_model(), "cores": available_cores(), "python": platform.python_version()}


def is_committed() -> bool:
    """Tell whether the working tree is that of a commit, so that a result can be reproduced.

    Other records may have been written since: they change nothing that is measured.
    """
    changes = _git("status", "--porcelain", "--", ":(top)", f":(exclude){RESULTS.name}")
    return _git("rev-parse", "--quiet", "--verify", "HEAD") != "" and changes == ""


def write(name: str, result: dict[str, Any]) -> Path:
    """Store `result` behind its header as `loadtest/results/NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(header() | result, indent=2) + "\n")
    return path


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


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()

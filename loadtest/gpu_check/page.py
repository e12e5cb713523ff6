"""The table of docs/gpu.md: `python -m loadtest.gpu_check.page` writes it from the record."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loadtest import record
from loadtest.gpu_check import claims

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
RECORD = record.RESULTS / "gpu_check.json"
BEGIN, END = "<!-- claims: written by make docs -->\n\n", "\n<!-- end of claims -->"
NO_RECORD = "Nothing is recorded yet: no line of this table has run on a GPU."


def render(text: str, recorded: Mapping[str, Any] | None) -> str:
    """Return the page with the table of a record, or of none.

    Raises:
        ValueError: the page lacks the lines around the table.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"expected {BEGIN.strip()} and {END.strip()} in {PAGE.name}")
    rows = claims.rows(recorded["sections"] if recorded else {})
    return f"{before}{BEGIN}{_conditions(recorded)}\n\n{claims.markdown(rows)}{END}{after}"


def load() -> Mapping[str, Any] | None:
    """Return the record, or None if nothing is recorded."""
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else None


def _conditions(recorded: Mapping[str, Any] | None) -> str:
    if recorded is None:
        return NO_RECORD
    found = recorded["sections"].get("machine", {}).get("results", {})
    gpus = ", ".join(f"{each['name']}, driver {each['driver']}" for each in found.get("gpus", []))
    about = f"{gpus or 'unknown GPU'}; {recorded['machine']['cpu']}; {recorded['date'][:10]}"
    link = f"[{RECORD.name}](../loadtest/results/{RECORD.name})"
    by_commit: dict[str, list[str]] = {}
    for name, section in recorded["sections"].items():
        by_commit.setdefault(section.get("commit", recorded["commit"]), []).append(name)
    commits = "; ".join(f"{commit}: {', '.join(names)}" for commit, names in by_commit.items())
    return f"{link}: {about}; `{recorded['command']}`. Sections by commit: {commits}."


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(), load()))

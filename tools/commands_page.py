"""Generator of docs/commands.md and of the JSON Schemas of files, run by `make docs`."""

import json
from typing import Any

import typer.main
from typer.testing import CliRunner

from nereid.assets import CHECKOUT
from nereid.cli.main import app
from nereid.rollout import plan
from nereid.routing import assignment
from nereid.text.fields import specification

TARGET = CHECKOUT / "docs" / "commands.md"
HEAD = """# Commands

`make docs` writes this page from the help of each command.

Exit codes of every command: 0 for success, 1 for a failure, 2 for wrong usage. If a command fails, the last
line on stderr begins with `error:` and has the reason.
"""


def render() -> str:
    """Return the page: one section per command, including the commands of groups."""
    return HEAD + "".join(_section(name) for name in commands(typer.main.get_command(app)))


def commands(group: Any, before: str = "") -> dict[str, Any]:
    """Return all commands of a group by name, such as `route` and `route set`."""
    found = {}
    for name, command in group.commands.items():
        found[before + name] = command
        if hasattr(command, "commands"):
            found |= commands(command, f"{before}{name} ")
    return found


def _section(command: str) -> str:
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    text = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="nereid", env=plain).stdout
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"\n## nereid {command}\n\n```\n{lines}\n```\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render())
    for name, module in (("route", assignment), ("rollout", plan), ("fields", specification)):
        (TARGET.parent / f"{name}.schema.json").write_text(json.dumps(module.json_schema(), indent=2) + "\n")

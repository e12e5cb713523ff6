"""The help of all commands for the site, and the JSON Schemas of files, which `make docs` writes."""

import json
from typing import Any

import typer.main
from typer.testing import CliRunner

from nereid.backends.routing import assignment
from nereid.base.assets import CHECKOUT
from nereid.cli.main import app
from nereid.models.rollout import plan
from nereid.tasks.read.fields import specification

DOCS = CHECKOUT / "docs"


def render() -> str:
    """Return the help of every command, including those of groups, as sections of docs/commands.md."""
    return "".join(_section(name) for name in commands(typer.main.get_command(app)))


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
    for name, module in (("route", assignment), ("rollout", plan), ("fields", specification)):
        (DOCS / f"{name}.schema.json").write_text(json.dumps(module.json_schema(), indent=2) + "\n")

"""The help of all commands for the site, and the JSON Schemas of files, which `make docs` writes."""

import json
from typing import Any

import msgspec
import typer.main
from typer.testing import CliRunner

from nereid.backends.routing.assignment import Route
from nereid.backends.routing.reference_file import Reference
from nereid.base.assets import CHECKOUT
from nereid.cli.main import app
from nereid.models.rollout.plan import RolloutPlan
from nereid.tasks.read.fields.specification import Specification

DOCS = CHECKOUT / "docs"
# Files that users write or keep: the title and the content of each, by the name of its schema.
FILES: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "fields": ("Nereid fields", Specification),
    "reference": ("Nereid reference of a route", Reference),
    "rollout": ("Nereid rollout plan", RolloutPlan),
    "route": ("Nereid route", Route),
}


def render() -> str:
    """Return the help of every command, including those of groups, as sections of docs/commands.md."""
    return "".join(_section(name) for name in commands(typer.main.get_command(app)))


def commands(group: Any, before: str = "") -> dict[str, Any]:
    """Return all commands of a group by name, such as `route` and `route set`."""
    by_name = {}
    for name, command in group.commands.items():
        by_name[before + name] = command
        if hasattr(command, "commands"):
            by_name |= commands(command, f"{before}{name} ")
    return by_name


def _section(command: str) -> str:
    plain = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    text = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="nereid", env=plain).stdout
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return f"\n## nereid {command}\n\n```\n{lines}\n```\n"


def json_schema(name: str) -> str:
    """Return the JSON Schema of a file."""
    title, struct = FILES[name]
    dialect = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": dialect, "title": title, **msgspec.json.schema(struct)}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name in FILES:
        (DOCS / f"{name}.schema.json").write_text(json_schema(name))

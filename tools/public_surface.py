"""What users can rely on, one line each; compare the output with that of another commit.

`python -m tools.public_surface` prints public Python names with their signatures, commands and options,
operations and schemas of the gateway, metrics, and the keys of files.
Each change needs an entry in the changelog.
"""

import inspect
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import typer.main

import nereid
from loadtest import servers
from nereid.base.assets import CHECKOUT
from nereid.cli.main import app
from tools.commands_page import DOCS, commands

START_S = 60.0


def names() -> Iterator[str]:
    """Yield public names, and the signatures of their public methods."""
    for name in nereid.__all__:
        value = getattr(nereid, name)
        yield f"name {name}{_signature(value) if callable(value) else ''}"
        for member, method in inspect.getmembers(value) if inspect.isclass(value) else ():
            if not member.startswith("_"):
                yield f"name {name}.{member}{_signature(method) if callable(method) else ''}"


def _signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return ""
    return re.sub(r"\b(?:nereid|typing|collections\.abc)\.(?:\w+\.)*|~", "", text)


def options() -> Iterator[str]:
    """Yield commands, their arguments and options, with defaults."""
    for name, command in commands(typer.main.get_command(app)).items():
        yield f"command {name}"
        for option in command.params:
            default = None if callable(option.default) else option.default
            words = "/".join([*option.opts, *option.secondary_opts])
            yield f"option {name} {words} {getattr(option, 'type', '')} {default}".replace(str(CHECKOUT), "")


def operations() -> Iterator[str]:
    """Yield the operations of a started gateway, their parameters, and the fields of each schema."""
    words = ["gateway", "--url", "127.0.0.1:9", "--model", "classify", "--port", "0", "--grpc-port", "0"]
    with servers.started(words) as (_, ready):
        url = f"http://127.0.0.1:{ready['http']}/openapi.json"
        with urllib.request.urlopen(url, timeout=START_S) as response:
            document = json.load(response)
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            parameters = sorted(parameter["name"] for parameter in about.get("parameters", ()))
            yield f"operation {method.upper()} {path} {parameters} {sorted(about['responses'])}"
    for schema, about in document["components"]["schemas"].items():
        for field, kind in about.get("properties", {}).items():
            yield f"schema {schema}.{field} {json.dumps(kind, sort_keys=True)}"


def files() -> Iterator[str]:
    """Yield metrics with their labels, and the keys of files, as their generated pages list them."""
    for row in re.findall(
        r"^\| `(\w+)` \| (\w+).*? \| .*? \| (.*?) \|", (DOCS / "metrics.md").read_text(), re.M
    ):
        yield f"metric {' '.join(row)}"
    for schema in sorted(DOCS.glob("*.schema.json")):
        for key, kind in _keys(json.loads(schema.read_text())):
            yield f"file {schema.name} {key} {kind}"


def _keys(schema: Any, before: str = "") -> Iterator[tuple[str, str]]:
    for key, kind in schema.get("properties", {}).items():
        yield before + key, json.dumps({name: kind[name] for name in ("type", "default") if name in kind})
    for name, inner in schema.get("$defs", {}).items():
        yield from _keys(inner, f"{name}.")


if __name__ == "__main__":
    print(*sorted({*names(), *options(), *operations(), *files()}), sep="\n")

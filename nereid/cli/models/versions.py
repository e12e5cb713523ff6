"""`nereid versions`, `remove` and `reload`: list versions, remove models, reload edited ones."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from nereid.application.chosen_models import changeable_repository
from nereid.base.assets import REPOSITORY
from nereid.base.errors import WrongUsage, no_server
from nereid.base.units import format_bytes
from nereid.cli.options import AsJson, Model, Repository, show_progress
from nereid.cli.server_options import find_server
from nereid.cli.tables import print_table

if TYPE_CHECKING:
    from nereid.models.publish.network import VersionState

COLUMNS = ("version", "state", "traffic", "pinned as", "size", "SHA-256", "published", "from", "changes")


def remove(
    context: typer.Context,
    model: Model,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the models without asking.")] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Remove a model from the server and the repository; for a route, also the models behind it."""
    from nereid.models.publish import remove as removal

    server_info = find_server(context, changeable_repository(repository))
    names = removal.find_parts(repository, model).models or (model,)
    if not yes:
        if not sys.stdin.isatty():
            raise WrongUsage("cannot ask without a terminal", f"--yes to remove {', '.join(names)}")
        if not typer.confirm(f"Remove {', '.join(names)} with all versions?"):
            print("nothing has changed", file=sys.stderr)
            return
    for name in removal.remove(repository, model, server_info, show_progress):
        print(f"{name}: removed")


def reload(context: typer.Context, model: Model, repository: Repository = REPOSITORY) -> None:
    """Reload a model after you edit its config or files, without interrupting its requests."""
    from nereid.models.publish import remove as removal

    server_info = find_server(context, changeable_repository(repository))
    if server_info is None:
        raise no_server(repository)
    removal.reload(repository, model, server_info)
    print(f"{model}: reloaded")


def versions(
    context: typer.Context, model: Model, as_json: AsJson = False, repository: Repository = REPOSITORY
) -> None:
    """List a model's versions: state, share of the traffic, size, and time and source of the publication."""
    from nereid.models.publish.network import versions as listed

    name, states = listed(repository, model, find_server(context, repository))
    if as_json:
        print(json.dumps({"model": name, "versions": [asdict(state) for state in states]}))
    else:
        _print(states)


def _print(versions: "Sequence[VersionState]") -> None:
    from nereid.models.routes.location import percent

    print_table(
        *COLUMNS,
        rows=[
            (
                str(version.version),
                version.state,
                "\n".join(f"{route} {percent(share)}" for route, share in version.shares.items()),
                ", ".join(version.pinned),
                format_bytes(version.size_bytes),
                version.sha256[:12],
                version.published,
                version.source,
                "\n".join(version.changes),
            )
            for version in versions
        ],
    )

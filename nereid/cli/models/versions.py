"""`nereid versions`: list the versions of a model."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from nereid.base.assets import REPOSITORY
from nereid.base.units import format_bytes
from nereid.cli.options import AsJson, Model, Repository
from nereid.cli.server_options import find_server
from nereid.cli.tables import print_table

if TYPE_CHECKING:
    from nereid.models.publish.network import VersionState

COLUMNS = ("version", "state", "traffic", "pinned as", "size", "SHA-256", "published", "from", "changes")


def versions(
    context: typer.Context, model: Model, as_json: AsJson = False, repository: Repository = REPOSITORY
) -> None:
    """List the versions of a model: state, share of the traffic, size, time and source of the publication."""
    from nereid.models.publish.network import versions as listed

    name, found = listed(repository, model, find_server(context, repository))
    if as_json:
        print(json.dumps({"model": name, "versions": [asdict(each) for each in found]}))
    else:
        _print(found)


def _print(versions: "Sequence[VersionState]") -> None:
    from nereid.models.routes.target import percent

    print_table(
        *COLUMNS,
        rows=[
            (
                str(each.version),
                each.state,
                "\n".join(f"{route} {percent(share)}" for route, share in each.shares.items()),
                ", ".join(each.pinned),
                format_bytes(each.size_bytes),
                each.sha256[:12],
                each.published,
                each.source,
                "\n".join(each.changes),
            )
            for each in versions
        ],
    )

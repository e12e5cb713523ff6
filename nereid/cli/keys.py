"""`nereid key`: the keys of a gateway."""

import json
from pathlib import Path
from typing import Annotated

import typer

from nereid.cli.options import AsJson, environment
from nereid.cli.tables import print_table
from nereid.gateway import key_changes
from nereid.gateway.key_changes import default_path, known_keys
from nereid.gateway.keys import SCOPES

app = typer.Typer(help="Manage the keys of a gateway: create, list and revoke them.")

KeysFile = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        help="File with the keys of the gateway.",
        envvar="NEREID_KEYS",
        show_default="~/.config/nereid/keys.json",
    ),
]


@app.command()
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the key's owner.", metavar="NAME")],
    scope: Annotated[
        list[str] | None,
        typer.Option(help=f"Permission of the key: {', '.join(SCOPES)}. Required; may be repeated."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Quota in images per second, on average.",
            min=0.001,
            show_default="from `nereid gateway --rate`",
        ),
    ] = None,
    file: KeysFile = None,
) -> None:
    """Create a key and print it once; the file stores only a digest. Running gateways accept it immediately.

    Scopes: `infer` may run models and show routes, `route` may change weights and rollouts, `admin` may do
    everything.
    """
    print(key_changes.add(file or default_path(environment(context)), name, scope or [], rate))


@app.command("list")
def list_keys(context: typer.Context, as_json: AsJson = False, file: KeysFile = None) -> None:
    """List the keys: owner, scopes, quota and date, never the secret."""
    known = known_keys(file or default_path(environment(context)))
    scopes = {key.id: [scope for scope in SCOPES if scope in key.scopes] for key in known}
    if as_json:
        documents = [
            {
                "id": key.id,
                "name": key.name,
                "scopes": scopes[key.id],
                "rate_per_s": key.rate_per_s,
                "created": key.created.isoformat(),
            }
            for key in known
        ]
        print(json.dumps(documents, indent=2))
        return
    rows = [
        (
            key.id,
            key.name,
            ", ".join(scopes[key.id]),
            "" if key.rate_per_s is None else f"{key.rate_per_s:g}",
            f"{key.created:%Y-%m-%d}",
        )
        for key in known
    ]
    print_table("id", "name", "scopes", "images/s", "created", rows=rows)


@app.command()
def revoke(
    context: typer.Context,
    name_or_id: Annotated[str, typer.Argument(help="Name or id of the key.", metavar="NAME|ID")],
    file: KeysFile = None,
) -> None:
    """Revoke a key; gateways reject it from the next request onwards."""
    key_changes.revoke(file or default_path(environment(context)), name_or_id)
    print(f"revoked '{name_or_id}'")

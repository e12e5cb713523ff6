"""`nereid key`: the keys of a gateway."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from nereid import files
from nereid.cli.options import AsJson, environment, show_help
from nereid.cli.tables import print_table
from nereid.errors import OperationFailed, WrongUsage
from nereid.gateway.admission import keys
from nereid.gateway.admission.keys import SCOPES, InvalidKeys, Key, KeyFile, KeyRing

app = typer.Typer()

KeysFile = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        help="File with the keys of the gateway.",
        envvar="NEREID_KEYS",
        show_default="~/.config/nereid/keys.json",
    ),
]


@app.callback(invoke_without_command=True)
def key(context: typer.Context) -> None:
    """Manage the keys of a gateway: create, list and revoke them."""
    show_help(context)


def default_path(environment: Mapping[str, str]) -> Path:
    """Return the default file for the keys of this user."""
    base = environment.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path(environment.get("HOME", "~")).expanduser() / ".config") / (
        "nereid/keys.json"
    )


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
            show_default="that of `nereid gateway --rate`",
        ),
    ] = None,
    file: KeysFile = None,
) -> None:
    """Create a key and print it once; the file keeps only a digest. Running gateways accept it immediately.

    Scopes: `infer` may classify and read, `route` may change weights, `admin` may do everything.
    """
    path = file or default_path(environment(context))
    key, secret = make(name, scope or [], rate)
    with _changing(path) as known:
        if any(each.name == name for each in known.keys):
            raise OperationFailed(f"'{name}' already has a key; fix: nereid key revoke '{name}'")
        _write(path, (*known.keys, key))
    print(secret)


@app.command("list")
def list_keys(context: typer.Context, as_json: AsJson = False, file: KeysFile = None) -> None:
    """List the keys: owner, scopes, quota and date, never the secret."""
    known = _read(file or default_path(environment(context))).keys
    scopes = {key.id: [each for each in SCOPES if each in key.scopes] for key in known}
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
    """Revoke a key: gateways reject it from the next request on."""
    path = file or default_path(environment(context))
    with _changing(path) as known:
        found = [key for key in known.keys if key.name == name_or_id] or [
            key for key in known.keys if key.id == name_or_id
        ]
        kept = tuple(key for key in known.keys if key not in found)
        if not found:
            names = ", ".join(key.name for key in known.keys) or "none"
            raise OperationFailed(f"'{path}' has no key '{name_or_id}', known keys: {names}")
        _write(path, kept)
    print(f"revoked '{name_or_id}'")


def make(name: str, scopes: list[str], rate: float | None) -> tuple[Key, str]:
    """Return a new key and its secret.

    Raises:
        WrongUsage: the name or a scope is invalid.
    """
    if not (0 < len(name) <= 64 and name.isascii() and name.isprintable()):
        raise WrongUsage(f"NAME: expected 1 to 64 printable ASCII characters, got {name!r}")
    if re.fullmatch("[0-9a-f]{8}", name):
        raise WrongUsage(
            f"NAME: expected a name that does not look like an id (8 hexadecimal digits), got {name!r}"
        )
    known = frozenset(scope for scope in SCOPES if scope in scopes)
    if not known or known != set(scopes):
        got = ", ".join(scopes) or "none"
        raise WrongUsage(f"--scope: expected one or more of {', '.join(SCOPES)}, got {got}")
    return keys.make(name, known, datetime.now(UTC).replace(microsecond=0), rate)


def ring(given: Path | None, environment: Mapping[str, str]) -> KeyRing:
    """Return the keys of a file; the default file may be created later.

    Raises:
        OperationFailed: the file is invalid or cannot be read.
    """
    try:
        return KeyRing(given or default_path(environment), may_come_later=given is None)
    except InvalidKeys as error:
        raise OperationFailed(str(error)) from None


def _read(path: Path) -> KeyFile:
    try:
        return keys.read(path) if path.exists() else KeyFile()
    except InvalidKeys as error:
        raise OperationFailed(str(error)) from None


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[KeyFile]:
    """Lock the file and read the keys; no other process changes them inside the context."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.locked_folder(path.parent):
        yield _read(path)


def _write(path: Path, known: tuple[Key, ...]) -> None:
    path.touch(mode=0o600)  # the replacement keeps the mode of the file
    files.replace(path, keys.format_keys(KeyFile(known)))

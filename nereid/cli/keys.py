"""`nereid key`: who may use a gateway."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nereid import files
from nereid.cli.options import reporting
from nereid.errors import OperationFailed, WrongUsage
from nereid.gateway.admission import keys
from nereid.gateway.admission.keys import SCOPES, InvalidKeys, Key, KeyFile, KeyRing

app = typer.Typer(no_args_is_help=True)

KeysFile = Annotated[
    Path | None,
    typer.Option(
        "--keys", help="File of keys.", envvar="NEREID_KEYS", show_default="~/.config/nereid/keys.json"
    ),
]


def default_path(environment: Mapping[str, str]) -> Path:
    """Return where this user's keys are kept unless told otherwise."""
    base = environment.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base else Path(environment.get("HOME", "~")).expanduser() / ".config") / (
        "nereid/keys.json"
    )


@app.command()
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    scope: Annotated[
        list[str] | None, typer.Option(help=f"What it may do: {', '.join(SCOPES)}. May be repeated.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Images per second it may have classified, on average.", min=0.001)
    ] = None,
    file: KeysFile = None,
) -> None:
    """Make a key and print it: only now, its file keeps a digest. Gateways take it at once.

    Scopes: `infer` classifies and looks, `route` changes weights, `admin` may do everything.
    """
    with reporting():
        path = file or default_path(context.obj)
        key, secret = make(name, scope or [], rate)
        with _changing(path) as known:
            if any(each.name == name for each in known.keys):
                raise OperationFailed(f"there is a key of '{name}' already; fix: nereid key revoke '{name}'")
            _write(path, (*known.keys, key))
        print(secret)


@app.command("list")
def list_keys(context: typer.Context, file: KeysFile = None) -> None:
    """Show whose keys there are, and what they may do."""
    with reporting():
        table = Table("id", "name", "scopes", "images/s", "created")
        for key in _read(file or default_path(context.obj)).keys:
            rate = "" if key.rate_per_s is None else f"{key.rate_per_s:g}"
            scopes = ", ".join(each for each in SCOPES if each in key.scopes)
            table.add_row(key.id, key.name, scopes, rate, f"{key.created:%Y-%m-%d}")
        Console().print(table)


@app.command()
def revoke(
    context: typer.Context,
    who: Annotated[str, typer.Argument(help="Name or id of the key.", metavar="NAME|ID")],
    file: KeysFile = None,
) -> None:
    """Take a key back: from the next request on it opens nothing."""
    with reporting():
        path = file or default_path(context.obj)
        with _changing(path) as known:
            found = [key for key in known.keys if key.name == who] or [
                key for key in known.keys if key.id == who
            ]
            kept = tuple(key for key in known.keys if key not in found)
            if not found:
                names = ", ".join(key.name for key in known.keys) or "none"
                raise OperationFailed(f"'{path}' has no key '{who}', it has: {names}")
            _write(path, kept)
        print(f"revoked '{who}'")


def make(name: str, scopes: list[str], rate: float | None) -> tuple[Key, str]:
    """Return a new key, and its secret.

    Raises:
        WrongUsage: no such name or scopes.
    """
    if not (0 < len(name) <= 64 and name.isascii() and name.isprintable()):
        raise WrongUsage(f"a name is 1 to 64 printable ASCII characters, got {name!r}")
    if re.fullmatch("[0-9a-f]{8}", name):
        raise WrongUsage(f"a name must not look like an id, 8 hexadecimal digits, got {name!r}")
    known = frozenset(scope for scope in SCOPES if scope in scopes)
    if not known or known != set(scopes):
        got = f", got {', '.join(scopes)}" if scopes else ""
        raise WrongUsage(f"say with --scope what the key may do, once or more: {', '.join(SCOPES)}{got}")
    return keys.make(name, known, datetime.now(UTC).replace(microsecond=0), rate)


def ring(given: Path | None, environment: Mapping[str, str]) -> KeyRing:
    """Return the keys of a file; one that nobody named may come later.

    Raises:
        OperationFailed: the file cannot be used.
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
    """Read the keys; inside, nobody else changes them."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.locked_folder(path.parent):
        yield _read(path)


def _write(path: Path, known: tuple[Key, ...]) -> None:
    path.touch(mode=0o600)  # what replaces a file takes over its mode
    files.replace(path, keys.format_keys(KeyFile(known)))

"""Changes to the key file, each made under a lock: adding and revoking keys."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from nereid.base import files
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.gateway import keys
from nereid.gateway.keys import SCOPES, Key, KeyFile, KeyRing


def default_path(environment: Mapping[str, str]) -> Path:
    """Return the default path of this user's key file."""
    base = environment.get("XDG_CONFIG_HOME", "")
    config = Path(base) if base else Path(environment.get("HOME", "~")).expanduser() / ".config"
    return config / "nereid" / "keys.json"


def open_ring(path: Path | None, environment: Mapping[str, str]) -> KeyRing:
    """Return the keys in a file; the default file may be created later.

    Raises:
        InvalidKeys: the file is invalid or cannot be read.
    """
    return KeyRing(path or default_path(environment), may_come_later=path is None)


def known_keys(path: Path) -> tuple[Key, ...]:
    """Return the keys in a file; a missing file has none.

    Raises:
        InvalidKeys: the file is invalid or cannot be read.
    """
    return keys.read(path).keys if path.exists() else ()


def add(path: Path, name: str, scopes: Sequence[str], rate_per_s: float | None) -> str:
    """Add a key and return its secret, which is not stored.

    Raises:
        WrongUsage: the name or a scope is invalid.
        OperationFailed: a key with this name already exists, or the file is invalid.
    """
    if not (0 < len(name) <= 64 and name.isascii() and name.isprintable()):
        raise WrongUsage(f"NAME: expected 1 to 64 printable ASCII characters, got {name!r}")
    if re.fullmatch("[0-9a-f]{8}", name):
        raise WrongUsage(
            f"NAME: expected a name that does not look like an id (8 hexadecimal digits), got {name!r}"
        )
    allowed = frozenset(scope for scope in SCOPES if scope in scopes)
    if not allowed or allowed != set(scopes):
        got = ", ".join(scopes) or "none"
        raise WrongUsage(f"--scope: expected one or more of {', '.join(SCOPES)}, got {got}")
    key, secret = keys.make(name, allowed, datetime.now(UTC).replace(microsecond=0), rate_per_s)
    with _locked(path) as known:
        if any(known_key.name == name for known_key in known):
            raise OperationFailed(f"'{name}' already has a key; fix: nereid key revoke '{name}'")
        _write(path, (*known, key))
    return secret


def revoke(path: Path, name_or_id: str) -> None:
    """Remove the key with the given name or, if there is none, the key with that id.

    Raises:
        OperationFailed: the file has no such key, or is invalid.
    """
    with _locked(path) as known:
        matches = [key for key in known if key.name == name_or_id] or [
            key for key in known if key.id == name_or_id
        ]
        if not matches:
            names = ", ".join(key.name for key in known) or "none"
            raise OperationFailed(f"'{path}' has no key '{name_or_id}', known keys: {names}")
        _write(path, tuple(key for key in known if key not in matches))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[tuple[Key, ...]]:
    """Lock the file and read the keys; no other process can change them while the context is open."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.locked_folder(path.parent):
        yield known_keys(path)


def _write(path: Path, known: tuple[Key, ...]) -> None:
    path.touch(mode=0o600)  # the replacement keeps the mode of the file
    files.replace(path, keys.format_keys(KeyFile(known)))

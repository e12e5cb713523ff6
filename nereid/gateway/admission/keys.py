"""API keys of the gateway and their scopes. The file holds digests, never a secret."""

import logging
import os
import secrets
import stat
from collections.abc import Mapping
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

log = logging.getLogger("nereid.gateway")
Scope = Literal["infer", "route", "admin"]
SCOPES: tuple[Scope, ...] = ("infer", "route", "admin")
# Prefix by which secret scanners recognise a key in logs and files.
SECRET_PREFIX = "nereid_"
# 256 random bits cannot be guessed, so the digest needs neither salt nor rounds.
SECRET_BYTES = 32
MAX_BYTES = 1_000_000


class InvalidKeys(Exception):
    """The key file is invalid; the message has the reason."""


class Key(Struct, frozen=True, forbid_unknown_fields=True):
    """One key with its scopes and quota; `admin` includes every scope.

    `rate_per_s` limits the images per second, on average; None means no limit.
    """

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(?!\n)$")]
    name: Annotated[str, Meta(pattern=r"^[ -~]{1,64}(?!\n)$")]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}(?!\n)$")]
    scopes: frozenset[Scope]
    created: Annotated[datetime, Meta(tz=True)]
    rate_per_s: Annotated[float, Meta(gt=0)] | None = None

    def may(self, scope: Scope) -> bool:
        """Return whether the key has a scope."""
        return scope in self.scopes or "admin" in self.scopes


class KeyFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a key file."""

    keys: tuple[Key, ...] = ()


def make(
    name: str, scopes: frozenset[Scope], created: datetime, rate_per_s: float | None = None
) -> tuple[Key, str]:
    """Return a new key, and the secret that is shown once."""
    secret = f"{SECRET_PREFIX}{secrets.token_urlsafe(SECRET_BYTES)}"
    return Key(secrets.token_hex(4), name, digest(secret), scopes, created, rate_per_s), secret


def digest(secret: str) -> str:
    """Return the digest that the file stores for a secret."""
    return sha256(secret.encode(errors="surrogateescape")).hexdigest()


def read(path: Path) -> KeyFile:
    """Read a key file.

    Raises:
        InvalidKeys: it cannot be read, other users may change it, or its content is invalid.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would block.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_BYTES + 1) if stat.S_ISREG(status.st_mode) else None
    except OSError as error:
        raise InvalidKeys(f"cannot read keys from '{path}': {error.strerror}") from None
    if text is None:
        raise InvalidKeys(f"cannot read keys from '{path}': it is not a regular file")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidKeys(f"'{path}' can be changed by others; fix: chmod 600 '{path}'")
    if len(text) > MAX_BYTES:
        raise InvalidKeys(f"'{path}' has more than {MAX_BYTES:,} bytes")
    try:
        return msgspec.json.decode(text, type=KeyFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidKeys(f"'{path}' is not a key file: {error}") from None


def format_keys(known: KeyFile) -> bytes:
    """Return the text of a key file."""
    return msgspec.json.format(msgspec.json.encode(known), indent=2) + b"\n"


class KeyRing:
    """The keys of a file that may change; an unreadable file grants nothing, and is logged.

    Args:
        path: the file; None for no keys.
        may_come_later: whether a missing file counts as a file without keys.

    Raises:
        InvalidKeys: the file is invalid.
    """

    def __init__(self, path: Path | None = None, may_come_later: bool = False) -> None:
        self._path = path
        self._seen: tuple[int, ...] = ()
        self._by_digest: Mapping[str, Key] = {}
        self.failure = ""
        if path is None or (may_come_later and not path.exists()):
            return
        self._load(_version(path))
        if self.failure:
            raise InvalidKeys(self.failure)

    def __len__(self) -> int:
        self._read()
        return len(self._by_digest)

    def find(self, secret: str) -> Key | None:
        """Return the key with this secret, or None."""
        self._read()
        return self._by_digest.get(digest(secret))

    def _read(self) -> None:
        """Read the file again if it changed; `failure` has the reason if it is invalid."""
        if self._path is None or (seen := _version(self._path)) == self._seen:
            return
        failed = self.failure
        self._load(seen)
        if self.failure != failed:
            log.warning("%s", self.failure or f"keys are read from '{self._path}' again")

    def _load(self, seen: tuple[int, ...]) -> None:
        assert self._path
        self._seen, self._by_digest, self.failure = seen, {}, ""
        try:
            self._by_digest = {key.sha256: key for key in read(self._path).keys}
        except InvalidKeys as error:
            self.failure = str(error)


def _version(path: Path) -> tuple[int, ...]:
    """Return values that change with the file; () if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode

"""The gateway's API keys, their permissions and quotas. The file stores digests, never secrets."""

import logging
import secrets
import stat
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from nereid.base import files
from nereid.base.contract import KEY_HEADER
from nereid.base.errors import InvalidConfig, OperationFailed
from nereid.gateway.failures import Failure
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.shared_tables import SharedTable

log = logging.getLogger("nereid.gateway")
Scope = Literal["infer", "route", "admin"]
SCOPES: tuple[Scope, ...] = ("infer", "route", "admin")
# Prefix that lets secret scanners recognise a key in logs and files.
SECRET_PREFIX = "nereid_"
# 256 random bits cannot be guessed, so the digest needs neither salt nor rounds.
SECRET_BYTES = 32
MAX_BYTES = 1_000_000


class InvalidKeys(OperationFailed):
    """The key file is invalid; the message gives the reason."""


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
    """Return a new key and its secret, which is shown only once."""
    secret = f"{SECRET_PREFIX}{secrets.token_urlsafe(SECRET_BYTES)}"
    return Key(secrets.token_hex(4), name, digest(secret), scopes, created, rate_per_s), secret


def digest(secret: str) -> str:
    """Return the digest that the file stores for a secret."""
    return sha256(secret.encode(errors="surrogateescape")).hexdigest()


def read(path: Path) -> KeyFile:
    """Read a key file.

    Raises:
        InvalidKeys: the file cannot be read, is writable by other users, or has invalid content.
    """
    try:
        content, stat_result = files.read_regular(path, MAX_BYTES)
    except OSError as error:
        raise InvalidKeys(f"cannot read keys from '{path}': {error.strerror}") from None
    except InvalidConfig as error:
        raise InvalidKeys(f"cannot read keys from {error.args[0]}") from None
    if stat_result.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidKeys(f"'{path}' can be changed by others; fix: chmod 600 '{path}'")
    try:
        return msgspec.json.decode(content, type=KeyFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidKeys(f"'{path}' is not a key file: {error}") from None


def format_keys(key_file: KeyFile) -> bytes:
    """Return the content of a key file."""
    return msgspec.json.format(msgspec.json.encode(key_file), indent=2) + b"\n"


class KeyRing:
    """The keys in a file that may change; an unreadable file grants nothing and is logged.

    Args:
        path: the file; None for no keys.
        may_come_later: whether a missing file is treated as having no keys.

    Raises:
        InvalidKeys: the file is invalid.
    """

    def __init__(self, path: Path | None = None, may_come_later: bool = False) -> None:
        self._path = path
        self._loaded_version: tuple[int, ...] = ()
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
        """Reload the file if it changed; `failure` gives the reason if it is invalid."""
        if self._path is None or (file_version := _version(self._path)) == self._loaded_version:
            return
        failed = self.failure
        self._load(file_version)
        if self.failure != failed:
            log.warning("%s", self.failure or f"keys are read from '{self._path}' again")

    def _load(self, file_version: tuple[int, ...]) -> None:
        assert self._path
        self._loaded_version, self._by_digest, self.failure = file_version, {}, ""
        try:
            self._by_digest = {key.sha256: key for key in read(self._path).keys}
        except InvalidKeys as error:
            self.failure = str(error)


def _version(path: Path) -> tuple[int, ...]:
    """Return values that change whenever the file does; () if it does not exist."""
    try:
        stat_result = path.stat()
    except OSError:
        return ()
    return stat_result.st_mtime_ns, stat_result.st_size, stat_result.st_ino, stat_result.st_mode


# "open": no key needed; "any": every valid key.
RequiredScope = Literal["open", "any", "infer", "route", "admin"]
EXPOSED_WITHOUT_KEYS = "listening beyond loopback needs API keys; fix: nereid key add NAME --scope infer"
REQUIRED_WITHOUT_KEYS = "there are no API keys yet; fix: nereid key add NAME --scope infer"
CHANGE_WITHOUT_KEYS = "a change needs a key; fix: nereid key add NAME --scope "
CHANGE_NEEDS: tuple[RequiredScope, ...] = ("route", "admin")
KEY_INSTRUCTION = "send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"


def check_ring(keys: KeyRing, settings: GatewaySettings) -> None:
    """Check that a gateway has keys if its callers need them.

    Raises:
        ValueError: keys are required but there are none.
    """
    if settings.requires_keys and not keys:
        raise ValueError(REQUIRED_WITHOUT_KEYS if settings.is_on_loopback else EXPOSED_WITHOUT_KEYS)


def secret_of(headers: dict[bytes, bytes]) -> str:
    """Return the secret sent with a request, or ""."""
    scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
    raw_secret = secret.strip() if scheme.lower() == b"bearer" else headers.get(KEY_HEADER.encode(), b"")
    return raw_secret.decode("latin-1")


def identify(
    keys: KeyRing, keys_needed: bool, headers: dict[bytes, bytes], need: RequiredScope
) -> Key | None:
    """Return the key of a request, or None if it sends no key and needs none.

    Args:
        keys_needed: whether operations that change nothing need a key; changes always do.
        headers: headers of the request, by lower-case name.

    Raises:
        Failure: the key is missing, unknown, or lacks the scope.
    """
    is_needed = need in CHANGE_NEEDS or (keys_needed and need != "open")
    secret = secret_of(headers)
    if not secret:
        if not is_needed:
            return None
        is_change = need in CHANGE_NEEDS and not keys
        fix = f"{CHANGE_WITHOUT_KEYS}{need}" if is_change else f"an API key is required; {KEY_INSTRUCTION}"
        raise Failure("unauthenticated", fix)
    if (key := keys.find(secret)) is None:
        raise Failure("unauthenticated", f"unknown API key; {KEY_INSTRUCTION}")
    if is_needed and need != "open" and need != "any" and not key.may(need):
        raise Failure("forbidden", f"the key '{key.name}' lacks the scope '{need}'")
    return key


# Of a bucket: the time of its last change, from the clock that all processes share, and its tokens.
BUCKET_FORMAT = "dd"


class Quotas:
    """Token buckets, one per key.

    Args:
        rate_per_s: rate for keys without their own; None for no limit.
        burst: capacity of a bucket, in images.
        buckets: the keys' tokens; new buckets by default.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        rate_per_s: float | None,
        burst: int,
        buckets: SharedTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate_per_s, self._burst, self._clock = rate_per_s, burst, clock
        self._buckets = buckets or SharedTable(BUCKET_FORMAT)

    def take(self, key: Key | None, tokens: int = 1, is_debt: bool = False) -> None:
        """Take tokens from a key's bucket; callers without a key share one bucket.

        Args:
            tokens: one per image.
            is_debt: take tokens even from an empty bucket, so that later requests wait longer.

        Raises:
            Failure: `rate_limited`, with the time until a token is available.
        """
        key_rate_per_s = None if key is None else key.rate_per_s
        rate_per_s = self._rate_per_s if key_rate_per_s is None else key_rate_per_s
        if rate_per_s is None or not tokens:
            return
        with self._buckets.locked(key.id if key else "") as bucket:
            now_s, left = self._clock(), float(self._burst)
            if bucket:
                at, had = bucket
                left = min(left, had + (now_s - at) * rate_per_s)
            is_enough = left >= tokens or is_debt
            bucket[:] = now_s, left - tokens if is_enough else left
        if not is_enough:
            wait_s = (tokens - left) / rate_per_s
            raise Failure("rate_limited", f"more than {rate_per_s:g} images per second", wait_s)

"""The gateway's API keys, their permissions and quotas. The file stores digests, never secrets."""

import fcntl
import logging
import mmap
import os
import secrets
import stat
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b, sha256
from math import inf
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from nereid.base.contract import KEY_HEADER
from nereid.gateway.failures import Failure
from nereid.gateway.settings import Settings

log = logging.getLogger("nereid.gateway")
Scope = Literal["infer", "route", "admin"]
SCOPES: tuple[Scope, ...] = ("infer", "route", "admin")
# Prefix that lets secret scanners recognise a key in logs and files.
SECRET_PREFIX = "nereid_"
# 256 random bits cannot be guessed, so the digest needs neither salt nor rounds.
SECRET_BYTES = 32
MAX_BYTES = 1_000_000


class InvalidKeys(Exception):
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
    """The keys in a file that may change; an unreadable file grants nothing and is logged.

    Args:
        path: the file; None for no keys.
        may_come_later: whether a missing file is treated as having no keys.

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
        """Reload the file if it changed; `failure` gives the reason if it is invalid."""
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
    """Return values that change whenever the file does; () if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode


# "open": no key needed; "any": every valid key.
Need = Literal["open", "any", "infer", "route", "admin"]
EXPOSED_WITHOUT_KEYS = "listening beyond loopback needs API keys; fix: nereid key add NAME --scope infer"
REQUIRED_WITHOUT_KEYS = "there are no API keys yet; fix: nereid key add NAME --scope infer"
CHANGE_WITHOUT_KEYS = "a change needs a key; fix: nereid key add NAME --scope "
CHANGES: tuple[Need, ...] = ("route", "admin")
HOW = "send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"


def check_ring(keys: KeyRing, settings: Settings) -> None:
    """Check that a gateway has keys if its callers need them.

    Raises:
        ValueError: keys are required but there are none.
    """
    if settings.requires_keys and not keys:
        raise ValueError(REQUIRED_WITHOUT_KEYS if settings.is_on_loopback else EXPOSED_WITHOUT_KEYS)


def secret_of(headers: dict[bytes, bytes]) -> str:
    """Return the secret sent with a request, or ""."""
    scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
    given = secret.strip() if scheme.lower() == b"bearer" else headers.get(KEY_HEADER.encode(), b"")
    return given.decode("latin-1")


def identify(keys: KeyRing, keys_needed: bool, headers: dict[bytes, bytes], need: Need) -> Key | None:
    """Return the key of a request, or None if it sends no key and needs none.

    Args:
        keys: the valid keys.
        keys_needed: whether classifying and reading need a key; changes always do.
        headers: headers of the request, by lower-case name.
        need: the operation's requirement.

    Raises:
        Failure: the key is missing, unknown, or lacks the scope.
    """
    is_needed = need in CHANGES or (keys_needed and need != "open")
    secret = secret_of(headers)
    if not secret:
        if not is_needed:
            return None
        is_change = need in CHANGES and not keys
        fix = f"{CHANGE_WITHOUT_KEYS}{need}" if is_change else f"an API key is required; {HOW}"
        raise Failure("unauthenticated", fix)
    if (key := keys.find(secret)) is None:
        raise Failure("unauthenticated", f"unknown API key; {HOW}")
    if is_needed and need != "open" and need != "any" and not key.may(need):
        raise Failure("forbidden", f"the key '{key.name}' lacks the scope '{need}'")
    return key


# More entries than the largest key file has keys. An entry holds the key's number (0: free), its tokens, and
# the time of the last change, from the monotonic clock that all processes share.
SLOTS, ENTRY = 2**14, struct.Struct("=Qdd")
# Entries searched for a key. If none of them is its own or free, the key takes over the oldest one.
MAX_TRIES = 32


@dataclass(slots=True)
class Bucket:
    """One key's tokens, and the time of their last change in seconds; `at_s` is None for a new key."""

    tokens: float = 0.0
    at_s: float | None = None


class TokenBuckets:
    """Buckets shared by forked processes; a killed process leaves no lock behind."""

    def __init__(self) -> None:
        self._file = os.memfd_create("nereid-buckets")
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, SLOTS * ENTRY.size)
        self._memory = mmap.mmap(self._file, SLOTS * ENTRY.size)

    @contextmanager
    def held(self, key_id: str) -> Iterator[Bucket]:
        """Yield a key's bucket, locked against other processes, and store it on exit."""
        number = int.from_bytes(blake2b(key_id.encode(), digest_size=8).digest()) or 1
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            place, is_own = self._place(number)
            bucket = Bucket(*ENTRY.unpack_from(self._memory, place)[1:]) if is_own else Bucket()
            yield bucket
            if bucket.at_s is not None:
                ENTRY.pack_into(self._memory, place, number, bucket.tokens, bucket.at_s)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _place(self, number: int) -> tuple[int, bool]:
        """Return the offset of a key's entry, and whether that entry is already its own."""
        oldest, oldest_s = 0, inf
        for each in range(MAX_TRIES):
            place = (number + each) % SLOTS * ENTRY.size
            found, _, at_s = ENTRY.unpack_from(self._memory, place)
            if found in (number, 0):
                return place, found == number
            if at_s < oldest_s:
                oldest, oldest_s = place, at_s
        return oldest, False


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
        buckets: TokenBuckets | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate_per_s, self._burst, self._clock = rate_per_s, burst, clock
        self._buckets = buckets or TokenBuckets()

    def take(self, key: Key | None, tokens: int = 1, is_debt: bool = False) -> None:
        """Take tokens from a key's bucket; callers without a key share one bucket.

        Args:
            key: owner of the bucket.
            tokens: one per image.
            is_debt: take tokens even from an empty bucket, so that later requests wait longer.

        Raises:
            Failure: `rate_limited`, with the time until a token is available.
        """
        own = None if key is None else key.rate_per_s
        rate_per_s = self._rate_per_s if own is None else own
        if rate_per_s is None or not tokens:
            return
        with self._buckets.held(key.id if key else "") as bucket:
            now_s, left = self._clock(), float(self._burst)
            if bucket.at_s is not None:
                left = min(left, bucket.tokens + (now_s - bucket.at_s) * rate_per_s)
            is_enough = left >= tokens or is_debt
            bucket.tokens, bucket.at_s = left - tokens if is_enough else left, now_s
        if not is_enough:
            wait_s = (tokens - left) / rate_per_s if rate_per_s else 3600.0
            raise Failure("rate_limited", f"more than {rate_per_s:g} images per second", wait_s)

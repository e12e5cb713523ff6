"""Authorization: the key that an operation needs, and the key that a request sends."""

from typing import Literal

from nereid.base.contract import KEY_HEADER
from nereid.gateway.admission.keys import Key, KeyRing
from nereid.gateway.failures import Failure
from nereid.gateway.settings import Settings

# "open": no key needed; "any": every valid key.
Need = Literal["open", "any", "infer", "route", "admin"]
EXPOSED_WITHOUT_KEYS = "listening beyond loopback needs API keys; fix: nereid key add NAME --scope infer"
REQUIRED_WITHOUT_KEYS = "there are no API keys yet; fix: nereid key add NAME --scope infer"
CHANGE_WITHOUT_KEYS = "a change needs a key; fix: nereid key add NAME --scope "
CHANGES: tuple[Need, ...] = ("route", "admin")
HOW = "send 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"


def check_ring(keys: KeyRing, settings: Settings) -> None:
    """Check that a gateway has keys, if its callers need some.

    Raises:
        ValueError: there are none.
    """
    if settings.requires_keys and not keys:
        raise ValueError(REQUIRED_WITHOUT_KEYS if settings.is_on_loopback else EXPOSED_WITHOUT_KEYS)


def secret_of(headers: dict[bytes, bytes]) -> str:
    """Return the secret that a request sends, or ""."""
    scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
    given = secret.strip() if scheme.lower() == b"bearer" else headers.get(KEY_HEADER.encode(), b"")
    return given.decode("latin-1")


def identify(keys: KeyRing, keys_needed: bool, headers: dict[bytes, bytes], need: Need) -> Key | None:
    """Return the key of a request; None if it sends no key and needs none.

    Args:
        keys: the valid keys.
        keys_needed: whether classifying and reading need a key; changes always do.
        headers: headers of the request, by lower-case name.
        need: requirement of the operation.

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

"""Who may do what: which key an operation needs, and whether a request shows one."""

from typing import Literal

from nereid.gateway.admission.keys import Key, KeyRing
from nereid.gateway.failures import Failure

# "open": everybody; "any": whoever has a key.
Need = Literal["open", "any", "infer", "route"]
EXPOSED = "listening beyond loopback needs API keys; fix: nereid key add NAME --scope infer"
NONE_YET = "there are no API keys yet; fix: nereid key add NAME --scope infer"
NO_KEYS = "changing a route needs a key; fix: nereid key add NAME --scope route"
HOW = "it comes as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"


def secret_of(headers: dict[bytes, bytes]) -> str:
    """Return the secret a request shows, "" if none."""
    scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
    given = secret.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return given.decode("latin-1")


def identify(keys: KeyRing, keys_needed: bool, headers: dict[bytes, bytes], need: Need) -> Key | None:
    """Return whose request it is; None if it shows no key and needs none.

    Args:
        keys: those that are good.
        keys_needed: classifying and looking need one, too; changing always does.
        headers: of the request, by lower-case name.
        need: of the operation.

    Raises:
        Failure: `need` is not met, or the key is not known.
    """
    is_needed = need == "route" or (keys_needed and need != "open")
    secret = secret_of(headers)
    if not secret:
        if not is_needed:
            return None
        is_change = need == "route" and not keys
        raise Failure("unauthenticated", NO_KEYS if is_change else f"an API key is needed; {HOW}")
    if (key := keys.find(secret)) is None:
        raise Failure("unauthenticated", f"this API key is not known; {HOW}")
    if is_needed and need in ("infer", "route") and not key.may(need):
        raise Failure("forbidden", f"the key '{key.name}' lacks the scope '{need}'")
    return key

"""Who may do what: API keys and their scopes, as `clients.gateway.keys` keeps them."""

from typing import Literal, Protocol

from clients.gateway.errors import Failure

Scope = Literal["infer", "route", "admin"]
# "open": everybody; "any": whoever has a key.
Need = Literal["open", "any", "infer", "route"]
NO_KEYS = (
    "changing a route needs a key; mend: nereid key add NAME --scope route, then start the gateway "
    "with --keys FILE"
)
EXPOSED = (
    "listening beyond loopback needs API keys; mend: nereid key add NAME --scope infer, then --keys FILE"
)


class Key(Protocol):
    """One key, without its secret."""

    @property
    def id(self) -> str:
        """What logs call it."""

    @property
    def name(self) -> str:
        """Whose it is."""

    @property
    def scopes(self) -> frozenset[Scope]:
        """What it is for; `admin` is for everything."""

    @property
    def rate_per_s(self) -> float | None:
        """Its own limit."""


class KeyRing(Protocol):
    """The keys that are good at the moment."""

    def find(self, secret: str) -> Key | None:
        """Return the key that has this secret."""


def secret_of(headers: dict[bytes, bytes]) -> str:
    """Return the secret a request shows, "" if none."""
    scheme, _, secret = headers.get(b"authorization", b"").partition(b" ")
    given = secret.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return given.decode("latin-1")


def identify(keys: KeyRing | None, headers: dict[bytes, bytes], need: Need) -> Key | None:
    """Return whose request it is; None where no key is needed and none is known.

    Raises:
        Failure: `need` is not met.
    """
    if keys is None:
        if need == "route":
            raise Failure("unauthenticated", NO_KEYS)
        return None
    secret = secret_of(headers)
    key = keys.find(secret) if secret else None
    if need == "open":
        return key
    if key is None:
        what = "this API key is not known" if secret else "an API key is needed"
        raise Failure(
            "unauthenticated", f"{what}; it comes as 'Authorization: Bearer KEY' or 'X-API-Key: KEY'"
        )
    if need != "any" and not key.scopes & {need, "admin"}:
        raise Failure("forbidden", f"the key '{key.name}' lacks the scope '{need}'")
    return key

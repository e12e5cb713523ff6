"""Security headers for browsers, and rejection of foreign hosts and origins."""

from nereid.contract import OPTION_HEADERS
from nereid.gateway.failures import Failure, invalid_request
from nereid.gateway.http.http_request import ROUTE_PREFIX, GatewayRequest, GatewayResponse
from nereid.gateway.settings import Settings

Head = list[tuple[bytes, bytes]]

_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'{style}; img-src 'self' blob:{image}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_COMMON: Head = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
STRICT: Head = [(b"content-security-policy", _CSP.format(style="", image="").encode()), *_COMMON]
# Swagger UI sets styles in its elements, and its icons are `data:`.
DOCS: Head = [
    (b"content-security-policy", _CSP.format(style=" 'unsafe-inline'", image=" data:").encode()),
    *_COMMON,
]
ALLOWED_METHODS = b"GET, HEAD, POST, PUT"
EXPOSED_HEADERS = b"x-request-id, traceparent, retry-after"
ALLOWED_HEADERS = (
    b"authorization, x-api-key, content-type, x-request-id, traceparent, x-request-timeout-ms, "
    + ", ".join(OPTION_HEADERS.values()).encode()
)
PREFLIGHT_S = b"600"


def head_of(path: str) -> Head:
    """Return the security headers of a page."""
    return DOCS if path == "/docs" or path.startswith("/docs/") else STRICT


class OriginGuard:
    """Check `Host` and `Origin`.

    A foreign page can point its own name at this machine (DNS rebinding); `Host` then has that name. A
    foreign page can also send simple requests without reading the responses; `Origin` then has its origin.
    Programs that are not browsers send no `Origin`.
    """

    def __init__(self, settings: Settings) -> None:
        self._hosts = settings.hosts
        self._origins = frozenset(origin.lower().encode() for origin in settings.cors_origins)

    def check(self, request: GatewayRequest) -> Head:
        """Return the CORS headers of the response.

        Raises:
            Failure: the request has a foreign host or origin.
        """
        host = request.headers.get(b"host", b"").lower()
        if self._hosts and hostname(host) not in self._hosts:
            raise invalid_request(f"the host {host.decode('latin-1')[:128]!r} is not allowed")
        origin = request.headers.get(b"origin")
        if origin is None:
            return [(b"vary", b"origin")] if self._origins else []
        if origin.lower() in self._origins:
            return [
                (b"vary", b"origin"),
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", EXPOSED_HEADERS),
            ]
        scheme, _, own = origin.lower().partition(b"://")
        # A proxy with TLS sends requests of its own pages, which have https, over plain HTTP.
        schemes = (b"https",) if request.scope.get("scheme") == "https" else (b"http", b"https")
        if own != host or scheme not in schemes:
            raise Failure("forbidden", f"the origin {origin.decode('latin-1')[:128]!r} is not allowed")
        return []

    def preflight(self, request: GatewayRequest) -> GatewayResponse | None:
        """Return the response to a CORS preflight; None for other requests."""
        is_preflight = (
            request.scope["method"] == "OPTIONS" and b"access-control-request-method" in request.headers
        )
        if not (is_preflight and request.headers.get(b"origin", b"").lower() in self._origins):
            return None
        request.endpoint = "preflight"
        wanted = request.headers.get(b"access-control-request-headers", b"")
        rules = [
            name for name in wanted.lower().replace(b" ", b"").split(b",") if name.startswith(ROUTE_PREFIX)
        ]
        return GatewayResponse(
            b"",
            b"text/plain",
            204,
            [
                (b"access-control-allow-methods", ALLOWED_METHODS),
                (b"access-control-allow-headers", b", ".join([ALLOWED_HEADERS, *rules])),
                (b"access-control-max-age", PREFLIGHT_S),
            ],
        )


def hostname(host: bytes) -> str:
    """Return the name in a `Host` header, without port and brackets."""
    text = host.decode("latin-1")
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]

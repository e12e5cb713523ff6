"""Handling common to every HTTP request: ids, security headers, operation, key, quota, metrics and log."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid.base.contract import OPTION_HEADERS
from nereid.gateway.failures import (
    CLIENT_CLOSED,
    GATEWAY_FAILED,
    SERVER_FAULTS,
    STATUS_BY_CODE,
    Failure,
    invalid_request,
)
from nereid.gateway.gateway_metrics import OTHER_LABEL
from nereid.gateway.http.http_request import ROUTE_PREFIX, GatewayRequest, GatewayResponse, failure_response
from nereid.gateway.http.upload import ClientClosed
from nereid.gateway.keys import identify
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.state import Gateway
from nereid.gateway.task_endpoint import Operation

log = logging.getLogger("nereid.gateway")
# One line of JSON per request.
access_log = logging.getLogger("nereid.gateway.access")
CLIENT_CLOSED_STATUS = 499
# If several codes share a status, the first one represents it.
_CODES = {status: code for code, status in reversed(STATUS_BY_CODE.items())}

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
# Swagger UI uses inline styles and `data:` icons.
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
PREFLIGHT_MAX_AGE_S = b"600"


_MODELS = "/v1/models/"
Find = Callable[[str, str], tuple[Operation, dict[str, str]]]


class RequestMiddleware:
    """The whole application; pure ASGI.

    Args:
        pages: handles requests for other paths.
        operations: the operations, matched here because Starlette's router would add 0.1 ms.
        find_v2: finds the operation for a v2 protocol path.
    """

    def __init__(
        self, pages: ASGIApp, gateway: Gateway, operations: Iterable[Operation], find_v2: Find
    ) -> None:
        self._pages, self._gateway, self._find_v2 = pages, gateway, find_v2
        self._origin_guard = OriginGuard(gateway.settings)
        self._methods: dict[str, dict[str, Operation]] = {}
        for operation in operations:
            for path in operation.paths:
                self._methods.setdefault(path, {})[operation.method] = operation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request, and record its outcome."""
        if scope["type"] != "http":
            await self._pages(scope, receive, send)
            return
        request = scope["nereid.request"] = GatewayRequest(scope, receive, self._gateway.tracer)
        path: str = scope["path"]
        added_headers = [
            *(DOCS if path == "/docs" or path.startswith("/docs/") else STRICT),
            (b"x-request-id", request.request_id.encode()),
            (b"traceparent", str(request.spans.context).encode()),
        ]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                message["headers"] = [*message["headers"], *added_headers]
            await send(message)

        try:
            request.reject_repeats()
            added_headers += self._origin_guard.check(request)
            reply = self._origin_guard.preflight(request) if scope["method"] == "OPTIONS" else None
            if not reply and (operation := self._find(scope)):
                self._admit(operation, request)
                if operation.is_of_model:
                    name = scope.get("path_params", {}).get("model")
                    request.offered_model = await self._gateway.models.find(name, operation.task)
                    request.model_name = request.offered_model.name
                reply = await operation.run(self._gateway, request)
            app: ASGIApp = self._pages if reply is None else reply
            await app(scope, receive, send_with_headers)
        except ClientClosed:
            request.outcome, request.status = CLIENT_CLOSED, CLIENT_CLOSED_STATUS
        except Exception as error:
            failure = logged_failure(request, error)
            if request.status and failure is not error:
                raise
            request.outcome = failure.code
            await failure_response(failure, request)(scope, receive, send_with_headers)
            del failure  # its traceback refers to this frame
        finally:
            request.outcome = request.outcome if request.status else CLIENT_CLOSED  # by a stop
            # Runs after the response, which uvloop writes at the end of this event loop iteration.
            asyncio.get_running_loop().call_soon(finish_request, self._gateway, request)
            # Break a reference cycle that would otherwise wait for Python's garbage collector.
            del scope["nereid.request"]

    def _admit(self, operation: Operation, request: GatewayRequest) -> None:
        """Check the key and quota.

        Raises:
            Failure: the request may not run the operation now, or not with this query.
        """
        gateway = self._gateway
        request.endpoint, request.is_inference = operation.path, operation.is_limited
        request.is_task_inference = operation.is_limited and operation.task is not None
        request.key = identify(gateway.keys, gateway.requires_keys, request.headers, operation.need)
        if operation.is_limited:
            gateway.quotas.take(request.key)
        else:
            request.query(operation.query)

    def _find(self, scope: Scope) -> Operation | None:
        """Return a request's operation, or None for other paths.

        Raises:
            Failure: the path has no operation with this method.
        """
        method, path = scope["method"], scope["path"]
        if path.startswith("/v2"):
            operation, scope["path_params"] = self._find_v2(method, path)
            return operation
        pattern = path
        if path.startswith(_MODELS):
            name, _, rest = path[len(_MODELS) :].partition("/")
            scope["path_params"], pattern = {"model": name}, f"{_MODELS}{{model}}/{rest}" if name else ""
        if (methods := self._methods.get(pattern)) is None:
            return None
        if entry := methods.get("GET" if method == "HEAD" else method):
            return entry
        failure = Failure("method_not_allowed", f"unknown operation {method} {path[:128]}")
        failure.more_headers = [(b"allow", ", ".join(methods).encode())]
        raise failure


def logged_failure(request: GatewayRequest, error: Exception) -> Failure:
    """Log an error if the service is at fault, and return the error response."""
    if not isinstance(error, Failure):
        log.exception("request %s failed", request.request_id)
        return Failure("inference_failed", GATEWAY_FAILED)
    if error.code in SERVER_FAULTS:
        log.warning("request %s: %s: %r", request.request_id, error.code, error.__cause__)
    return error


def finish_request(gateway: Gateway, request: GatewayRequest) -> None:
    """Record a request's outcome and release what it held."""
    outcome = request.outcome or _CODES.get(request.status, "ok")
    endpoint, model = request.endpoint or OTHER_LABEL, request.model_name
    total_s = time.perf_counter() - request.arrived_at
    gateway.uploads.buffers.release(request.key_id, request.body_bytes)
    stages_s = {"total": total_s, **request.stages_s}
    gateway.metrics.count("requests", endpoint, model, request.variant, outcome, stages_s)
    if request.is_task_inference and not request.images:
        (request.offered_model or gateway.models.default).recent_load.record(outcome, "", 0.0)
    if request.is_inference and request.spans.is_traced:
        is_fault = outcome in SERVER_FAULTS or outcome == "deadline_exceeded"
        attributes = {"endpoint": endpoint, "model": model, "variant": request.variant}
        request.spans.end(request.request_id, outcome, is_fault, **attributes)
    if access_log.isEnabledFor(logging.INFO):
        access_log.info("%s", _log_line(request, outcome, total_s))


def _log_line(request: GatewayRequest, outcome: str, total_s: float) -> str:
    return json.dumps(
        {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "method": request.scope["method"],
            "path": request.scope["path"],
            "status": request.status,
            "outcome": outcome,
            "ms": round(total_s * 1e3, 1),
            "request_id": request.request_id,
            "trace_id": request.spans.context.trace_id,
            "model": request.model_name,
            "variant": request.variant,
            "bytes": request.body_bytes,
            "stages_ms": {stage: round(seconds * 1e3, 3) for stage, seconds in request.stages_s.items()},
            "key_id": request.key_id or None,
        }
    )


class OriginGuard:
    """Check `Host` and `Origin`.

    A foreign page can point its own host name at this machine (DNS rebinding), and `Host` then contains that
    name. It can also send simple requests without reading the responses, and `Origin` then contains its
    origin. Programs that are not browsers send no `Origin`.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._hosts = settings.hosts
        self._origins = frozenset(origin.lower().encode() for origin in settings.cors_origins)

    def check(self, request: GatewayRequest) -> Head:
        """Return the CORS headers for the response.

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
        scheme, _, origin_host = origin.lower().partition(b"://")
        # A TLS proxy forwards requests from its own https pages over plain HTTP.
        schemes = (b"https",) if request.scope.get("scheme") == "https" else (b"http", b"https")
        if origin_host != host or scheme not in schemes:
            raise Failure("forbidden", f"the origin {origin.decode('latin-1')[:128]!r} is not allowed")
        return []

    def preflight(self, request: GatewayRequest) -> GatewayResponse | None:
        """Return the response to a CORS preflight; None for other requests with method OPTIONS."""
        is_preflight = b"access-control-request-method" in request.headers
        if not (is_preflight and request.headers.get(b"origin", b"").lower() in self._origins):
            return None
        request.endpoint = "preflight"
        requested = request.headers.get(b"access-control-request-headers", b"")
        rules = [
            name for name in requested.lower().replace(b" ", b"").split(b",") if name.startswith(ROUTE_PREFIX)
        ]
        return GatewayResponse(
            b"",
            b"text/plain",
            204,
            [
                (b"access-control-allow-methods", ALLOWED_METHODS),
                (b"access-control-allow-headers", b", ".join([ALLOWED_HEADERS, *rules])),
                (b"access-control-max-age", PREFLIGHT_MAX_AGE_S),
            ],
        )


def hostname(host: bytes) -> str:
    """Return the name in a `Host` header, without port and brackets."""
    text = host.decode("latin-1")
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]

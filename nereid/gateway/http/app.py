"""The gateway as an ASGI application."""

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from nereid.client.request import CONCURRENCY, check_arguments
from nereid.gateway.admission.access import check_ring, identify
from nereid.gateway.admission.keys import KeyRing
from nereid.gateway.failures import Code, Failure
from nereid.gateway.http import static
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, failure_response, json_response
from nereid.gateway.http.middleware import RequestMiddleware
from nereid.gateway.http.openapi import document
from nereid.gateway.http.operations import OPERATIONS, Operation
from nereid.gateway.models import Models, ModelSource
from nereid.gateway.settings import Settings
from nereid.gateway.state import Gateway, build
from nereid.gateway.v2 import http_front
from nereid.gateway.workers.shared_state import SharedState
from nereid.http_connection import HttpConnections

_CODES: dict[int, Code] = {404: "not_found", 405: "method_not_allowed"}


def create_gateway(
    settings: Settings, keys: KeyRing, source: ModelSource, shared: SharedState | None = None
) -> Gateway:
    """Return the state of a gateway; it connects to Triton with the first request.

    Args:
        settings: settings of the gateway.
        keys: the valid keys; without keys, every caller on loopback may classify and read.
        source: names and routes of the models.
        shared: state of the gateway's workers, None if it is a single process.

    Raises:
        ValueError: keys are required, but none exist; or the address of the server is invalid.
    """
    check_ring(keys, settings)
    check_arguments(settings.url, "http", CONCURRENCY, None)
    return build(settings, keys, Models(settings.model, source, HttpConnections(settings.url)), shared)


def create_app(gateway: Gateway) -> ASGIApp:
    """Return the ASGI application of a gateway: the REST API, the page, and the v2 protocol."""
    app = rest_app(gateway)
    v2 = RequestMiddleware(V2(gateway), gateway)

    async def either(scope: Scope, receive: Receive, send: Send) -> None:
        is_v2 = scope["type"] == "http" and scope["path"].startswith("/v2")
        await (v2 if is_v2 else app)(scope, receive, send)

    return either


class V2:
    """The v2 protocol as an ASGI application.

    Starlette's application and router would add 0.1 ms to each request.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._endpoints = {each: Endpoint(gateway, each) for each in http_front.OPERATIONS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request."""
        operation, scope["path_params"] = http_front.find(scope["method"], scope["path"])
        await self._endpoints[operation](scope, receive, send)


def rest_app(gateway: Gateway) -> Starlette:
    """Return the REST API and the page of a gateway."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        gateway.triton.close()
        if gateway.tracer:
            gateway.tracer.close()

    described = (*OPERATIONS, Operation("GET", "/openapi.json", openapi, "open", None))
    operations = [
        Route(path, Endpoint(gateway, each), methods=[each.method])
        for each in described
        for path in each.paths
    ]
    app = Starlette(
        routes=[*operations, *static.ROUTES],
        middleware=[Middleware(RequestMiddleware, gateway)],
        exception_handlers={HTTPException: reject_unknown},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


class Endpoint:
    """An operation as an ASGI application: check key and quota, then run the operation."""

    def __init__(self, gateway: Gateway, operation: Operation) -> None:
        self._gateway, self._operation = gateway, operation
        self._keys_needed = gateway.settings.requires_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request of the operation."""
        request: GatewayRequest = scope["nereid.request"]
        gateway, operation = self._gateway, self._operation
        request.endpoint, request.is_inference = operation.path, operation.is_limited
        request.key = identify(gateway.keys, self._keys_needed, request.headers, operation.need)
        if operation.is_limited:
            gateway.quotas.take(request.key)
        else:
            request.query(operation.query)
        if operation.is_of_model:
            name = scope["path_params"].get("model")
            request.offered = await gateway.models.find(name, operation.task)
        reply: GatewayResponse = await operation.run(gateway, request)
        await reply(scope, receive, send)


async def openapi(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Describe all operations of the gateway."""
    return json_response(document(OPERATIONS, gateway.settings.max_timeout_s))


async def reject_unknown(found: Request, error: Exception) -> Response:
    """Respond to an unknown path, or to a method that a path does not support."""
    assert isinstance(error, HTTPException)
    request: GatewayRequest = found.scope["nereid.request"]
    method, path = found.method, found.url.path
    code = _CODES.get(error.status_code, "invalid_request")
    failure = Failure(code, f"unknown operation {method} {path[:128]}")
    request.outcome = failure.code
    reply = failure_response(failure, request)
    reply.headers += [
        (name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()
    ]
    return reply  # type: ignore[return-value]

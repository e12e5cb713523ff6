"""The gateway as an ASGI application."""

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from nereid.base.http_connection import HttpConnections
from nereid.client.request import CONCURRENCY, check_arguments
from nereid.gateway.admission.access import check_ring
from nereid.gateway.admission.keys import KeyRing
from nereid.gateway.endpoint import Operation
from nereid.gateway.failures import Code, Failure
from nereid.gateway.http import static
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, failure_response, json_response
from nereid.gateway.http.middleware import RequestMiddleware
from nereid.gateway.http.openapi import document
from nereid.gateway.http.operations import OPERATIONS
from nereid.gateway.models import Models, ModelSource
from nereid.gateway.settings import Settings
from nereid.gateway.state import Gateway, build
from nereid.gateway.v2 import http_front
from nereid.gateway.workers.shared_state import SharedState

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

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        gateway.triton.close()
        if gateway.tracer:
            gateway.tracer.close()

    pages = Starlette(
        routes=static.ROUTES, exception_handlers={HTTPException: reject_unknown}, lifespan=lifespan
    )
    pages.router.redirect_slashes = False
    described = (*OPERATIONS, Operation("GET", "/openapi.json", openapi, "open", None))
    return RequestMiddleware(pages, gateway, described, http_front.find)


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

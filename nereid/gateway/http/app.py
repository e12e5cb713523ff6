"""The gateway as an ASGI application, including the static files it serves."""

import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path, PurePath
from typing import Any

import swagger_ui_bundle
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from nereid.base.http_connection import HttpConnectionPool
from nereid.base.task_registry import DEFAULT_TASK, TASK_FOLDERS, TASKS
from nereid.client.request import DEFAULT_CONCURRENCY, check_arguments
from nereid.gateway.failures import Code, Failure
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, failure_response, json_response
from nereid.gateway.http.middleware import RequestMiddleware
from nereid.gateway.http.openapi import document
from nereid.gateway.http.operations import OPERATIONS, SAMPLES
from nereid.gateway.keys import KeyRing, check_ring
from nereid.gateway.models import Models, ModelSource
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.state import Gateway
from nereid.gateway.task_endpoint import Operation
from nereid.gateway.v2 import http_operations
from nereid.gateway.workers import SharedState

PAGE = Path(__file__).parents[1] / "page"
NO_CACHE = {"cache-control": "no-cache"}
_SWAGGER = ("swagger-ui.css", "swagger-ui-bundle.js", "favicon-32x32.png")
_DOCS = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<title>Nereid: API</title>
<link rel="icon" href="/docs/favicon-32x32.png">
<link rel="stylesheet" href="/docs/swagger-ui.css">
<div id="ui"></div>
<script src="/docs/swagger-ui-bundle.js"></script>
<script type="module" src="/docs/start.js"></script>
</html>
"""
# The bundle is Swagger UI 4, which renders 3.1 documents only if they claim to be 3.0.
_START = """const answer = await fetch("/openapi.json");
const spec = { ...(await answer.json()), openapi: "3.0.3" };
SwaggerUIBundle({ spec, dom_id: "#ui", deepLinking: true });
"""


class Page(StaticFiles):
    """Files that browsers revalidate, so users see new releases; `name` restricts the file names served."""

    def __init__(self, directory: Path, name: str = "*") -> None:
        super().__init__(directory=directory)
        self._name = name

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        """Return the file for a path and its status, or None as status if it is not served."""
        return super().lookup_path(path) if PurePath(path).match(self._name) else ("", None)

    def file_response(self, *args: Any, **options: Any) -> Response:
        """Return a file response that caches must revalidate."""
        response = super().file_response(*args, **options)
        response.headers.update(NO_CACHE)
        return response


async def page_tasks(request: Request) -> Response:
    """Serve the JavaScript module that lists the page's tasks; each has a `page.js` in its folder."""
    folders = {task.name: task.folder for task in TASKS}
    imports = (f'import {{ {name} }} from "./tasks/{folder}/page.js";' for name, folder in folders.items())
    task_objects = {task.name: json.dumps({"name": task.name, "path": task.path[1:]}) for task in TASKS}
    entries = (f"  {name}: {{ ...{name}, ...{about} }}," for name, about in task_objects.items())
    default = f"export const DEFAULT = TASKS.{DEFAULT_TASK.name};"
    text = "\n".join([*imports, "export const TASKS = {", *entries, "};", default, ""])
    return Response(text, media_type="text/javascript", headers=NO_CACHE)


async def docs(request: Request) -> Response:
    """Show the OpenAPI document."""
    return HTMLResponse(_DOCS)


async def docs_file(request: Request) -> Response:
    """Serve a file of Swagger UI."""
    name = request.path_params["name"]
    if name == "start.js":
        return Response(_START, media_type="text/javascript")
    if name not in _SWAGGER:
        raise HTTPException(404)
    return FileResponse(Path(swagger_ui_bundle.swagger_ui_path) / name)


async def sample(request: Request) -> Response:
    """Serve a sample image."""
    for path in SAMPLES:
        if path.name == request.path_params["name"]:
            return FileResponse(path)
    raise HTTPException(404)


async def index(request: Request) -> Response:
    """Serve the page's index."""
    return FileResponse(PAGE / "index.html", headers=NO_CACHE)


ROUTES: tuple[BaseRoute, ...] = (
    Route("/", index),
    Route("/samples/{name}", sample),
    Route("/docs", docs),
    Route("/docs/{name}", docs_file),
    Route("/page/tasks.js", page_tasks),
    Mount("/page/tasks", Page(TASK_FOLDERS, "page.js")),
    Mount("/page", Page(PAGE)),
)


_CODES: dict[int, Code] = {404: "not_found", 405: "method_not_allowed"}


def create_gateway(
    settings: GatewaySettings, keys: KeyRing, source: ModelSource, shared: SharedState | None = None
) -> Gateway:
    """Return a gateway's state; it connects to Triton on the first request.

    Without keys, every caller on loopback may do what changes nothing.

    Raises:
        ValueError: keys are required but none exist, or the server's address is invalid.
    """
    check_ring(keys, settings)
    check_arguments(settings.url, "http", DEFAULT_CONCURRENCY, None)
    models = Models(settings.model, source, HttpConnectionPool(settings.url))
    return Gateway(settings, keys, models, shared)


def create_app(gateway: Gateway) -> ASGIApp:
    """Return a gateway's ASGI application: the REST API, the web page and the v2 protocol."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        gateway.models.triton.close()
        if gateway.tracer:
            gateway.tracer.close()

    pages = Starlette(routes=ROUTES, exception_handlers={HTTPException: reject_unknown}, lifespan=lifespan)
    pages.router.redirect_slashes = False
    described = (*OPERATIONS, Operation("GET", "/openapi.json", openapi, "open", None))
    return RequestMiddleware(pages, gateway, described, http_operations.find)


async def openapi(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Describe all operations of the gateway."""
    return json_response(document(OPERATIONS, gateway.settings.max_timeout_s))


async def reject_unknown(starlette_request: Request, error: Exception) -> Response:
    """Respond to an unknown path or an unsupported method."""
    assert isinstance(error, HTTPException)
    request: GatewayRequest = starlette_request.scope["nereid.request"]
    method, path = starlette_request.method, starlette_request.url.path
    code = _CODES.get(error.status_code, "invalid_request")
    failure = Failure(code, f"unknown operation {method} {path[:128]}")
    request.outcome = failure.code
    reply = failure_response(failure, request)
    reply.headers += [
        (name.lower().encode(), value.encode()) for name, value in (error.headers or {}).items()
    ]
    return reply  # type: ignore[return-value]

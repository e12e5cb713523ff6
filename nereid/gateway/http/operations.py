"""The gateway's operations: one table for paths, required keys and the OpenAPI page."""

import asyncio
from pathlib import Path

from msgspec import Struct

from nereid.base.task_registry import TASKS
from nereid.gateway.failures import Failure
from nereid.gateway.gateway_metrics import CONTENT_TYPE, LiveState
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, json_response
from nereid.gateway.http.upload import JSON, ImageBody
from nereid.gateway.keys import Scope
from nereid.gateway.model_endpoints import PUBLISH_PARAMETERS, preview, publish
from nereid.gateway.models import PublishAnswer
from nereid.gateway.readiness import Health, Ready
from nereid.gateway.route_control import RolloutChange, RouteState, RouteView, Weights
from nereid.gateway.state import Gateway
from nereid.gateway.task_endpoint import BODY_ERRORS, IMAGE_MEDIA_TYPES, Operation, operations_of


class Access(Struct):
    """Permissions of the caller."""

    keys_needed: bool
    name: str | None
    scopes: list[Scope]


class ModelName(Struct):
    """A model that the gateway offers, and its task; "" if not known."""

    name: str
    task: str = ""


*_others, _last = (task.name for task in TASKS)
ModelName.__doc__ = (
    f'A model that the gateway offers, and its task: {", ".join(_others)} or {_last}; "" if not known.'
)


class Sample(Struct):
    """A sample image and the tasks it suits."""

    name: str
    url: str
    credit: str
    tasks: list[str]


SAMPLES: dict[Path, Sample] = {}
for _task in TASKS:
    for _path, _credit in _task.entry_point("endpoint").photos.items():
        SAMPLES.setdefault(_path, Sample(_path.stem, f"/samples/{_path.name}", _credit, []))
        SAMPLES[_path].tasks.append(_task.name)


async def models(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """List the models; the first model for a task is the default for requests that do not name one."""
    pairs = [(model.name, await model.find_task()) for model in await gateway.models.all()]
    return json_response([ModelName(name, task.name if task else "") for name, task in pairs])


async def live(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return rates, latencies and outcomes of the last minute, and whether the model is ready."""
    return json_response(gateway.live_state(request.model))


async def show_route(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return the variants and weights of the route."""
    return json_response(await _route(request).show())


async def set_weights(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Change the weights of the route's variants."""
    route = _route(request)
    weights = await gateway.uploads.read_json(request, Weights)
    return json_response(await route.change(route.control.set_weights, weights, _author(request)))


async def order_rollout(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Start, pause, resume, promote or abort a rollout of the route."""
    route = _route(request)
    order = await gateway.uploads.read_json(request, RolloutChange)
    return json_response(await route.change(route.control.order_rollout, order, _author(request)))


def _route(request: GatewayRequest) -> RouteView:
    if request.model.route is None:
        raise Failure("no_route_control", f"this gateway does not control a route '{request.model.name}'")
    return request.model.route


def _author(request: GatewayRequest) -> str:
    return request.key.name if request.key else ""


async def access(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return the permissions of the caller's key."""
    keys_needed, key = gateway.settings.requires_keys, request.key
    scopes = {*(key.scopes if key else ()), *(() if keys_needed else ("infer",))}
    return json_response(Access(keys_needed, key.name if key else None, sorted(scopes)))


async def metrics(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return the metrics in Prometheus' text format."""
    # In a thread, because with several workers the page is read from their files.
    return GatewayResponse(await asyncio.to_thread(gateway.metrics.page), CONTENT_TYPE)


async def healthz(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return the liveness of the process."""
    return json_response(Health(True))


async def readyz(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return whether the default model responds to an image."""
    ready = await gateway.models.default.readiness.state()
    return json_response(ready, 200 if ready.ready else 503)


async def samples(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """List the sample images."""
    return json_response([*SAMPLES.values()])


OPERATIONS = (
    *(operation for task in TASKS for operation in operations_of(task)),
    Operation(
        *("POST", "/v1/preview", preview, "infer", None),
        body=ImageBody,
        media_types=IMAGE_MEDIA_TYPES,
        errors=(
            *BODY_ERRORS,
            "invalid_image",
            "not_found",
            "rate_limited",
            "overloaded",
            "deadline_exceeded",
        ),
        is_limited=True,
        is_of_model=True,
        response_media_type="image/png",
    ),
    Operation("GET", "/v1/models", models, "infer", list[ModelName]),
    Operation("GET", "/v1/live", live, "infer", LiveState, is_of_model=True),
    Operation(
        *("GET", "/v1/route", show_route, "infer", RouteState),
        errors=("no_route_control", "unavailable"),
        is_of_model=True,
    ),
    *(
        Operation(
            *(method, path, run, "route", RouteState),
            body=body,
            media_types=(JSON,),
            errors=("no_route_control", "conflict", "unavailable", *BODY_ERRORS),
            is_of_model=True,
        )
        for method, path, run, body in (
            ("PUT", "/v1/route/weights", set_weights, Weights),
            ("POST", "/v1/rollout", order_rollout, RolloutChange),
        )
    ),
    Operation(
        *("POST", "/v1/publish", publish, "admin", PublishAnswer, PUBLISH_PARAMETERS),
        media_types=("application/octet-stream",),
        errors=("not_found", "conflict", "unavailable", *BODY_ERRORS),
        is_of_model=True,
    ),
    Operation("GET", "/v1/access", access, "open", Access),
    Operation("GET", "/metrics", metrics, "any", None),
    Operation("GET", "/healthz", healthz, "open", Health),
    Operation("GET", "/readyz", readyz, "open", Ready),
    Operation("GET", "/samples", samples, "open", list[Sample]),
)

"""The operations of the gateway: one table for paths, required keys and the OpenAPI page."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from nereid.base.assets import CHELSEA, COFFEE, PARCEL_LABEL
from nereid.gateway.answers import Answer, BatchAnswer
from nereid.gateway.endpoints import PUBLISH_PARAMETERS, Feedback, FeedbackAnswer, feedback, preview, publish
from nereid.gateway.failures import Code, Failure, invalid_request
from nereid.gateway.gateway_metrics import CONTENT_TYPE, LiveState
from nereid.gateway.gateway_task import CLASSIFY, DETECT, READ, WAYBILL, GatewayTask
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, json_response
from nereid.gateway.http.upload import FORM, JSON, BatchBody, ImageBody
from nereid.gateway.keys import Need, Scope
from nereid.gateway.models import DocumentField, PublishAnswer
from nereid.gateway.predict import PARAMETERS, ROUTE_PARAMETERS, classify_batch, predict
from nereid.gateway.readiness import Health, Ready
from nereid.gateway.route_control import (
    RolloutOrder,
    RouteConflict,
    RouteFailed,
    RouteRefused,
    RouteState,
    RouteView,
)
from nereid.gateway.state import Gateway
from nereid.tasks.detect.endpoint import DetectAnswer, detect
from nereid.tasks.read import endpoint as read_endpoints
from nereid.tasks.read.endpoint import ReadAnswer, WaybillAnswer, read, waybill


class Access(Struct):
    """Permissions of the caller."""

    keys_needed: bool
    name: str | None
    scopes: list[Scope]


class Weights(Struct, forbid_unknown_fields=True):
    """New weights by variant; a generation makes the change conditional."""

    weights: dict[str, float]
    generation: int | None = None


class RolloutChange(Struct, forbid_unknown_fields=True):
    """An order for a rollout; `candidate` and `steps` belong to `start`."""

    order: RolloutOrder
    candidate: str = ""
    steps: list[str | float] = []


class ModelName(Struct):
    """A model that the gateway offers, and its task: classify, read, waybill or detect; "" if not known."""

    name: str
    task: str = ""


class Sample(Struct):
    """A sample image, and the tasks that it suits."""

    name: str
    url: str
    credit: str
    tasks: list[str]


def _sample(path: Path, credit: str, *tasks: GatewayTask) -> Sample:
    return Sample(path.stem, f"/samples/{path.name}", credit, [task.name for task in tasks])


SAMPLES_OF_TASKS = [
    _sample(COFFEE, "Rachel Michetti, courtesy of Pikolo Espresso Bar, CC0", CLASSIFY, DETECT),
    _sample(CHELSEA, "Stéfan van der Walt, CC0", CLASSIFY, DETECT),
    _sample(PARCEL_LABEL, "rendered for Nereid", READ, WAYBILL),
]


async def models(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """List the models; the first one of a task answers its requests that name no model."""
    found = [(model.name, await gateway.models.task_of(model)) async for model in gateway.models.all()]
    return json_response([ModelName(name, task.name if task else "") for name, task in found])


async def live(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return rates, latencies and outcomes of the last minute, and whether the model is ready."""
    return json_response(gateway.load(request.model))


async def show_route(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return the variants and weights of the route."""
    route = _route(request)
    try:
        return json_response(await route.show())
    except RouteFailed as error:
        raise Failure("unavailable", "the route cannot be read", 1.0) from error


async def set_weights(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Change the weights of the route's variants."""
    route = _route(request)
    author = request.key.name if request.key else ""
    change = await gateway.uploads.json(request, gateway.settings.default_timeout_s, Weights)
    try:
        return json_response(await route.set_weights(change.weights, change.generation, author))
    except RouteConflict as error:
        raise Failure("conflict", str(error)) from None
    except RouteRefused as error:
        raise invalid_request(str(error)) from None
    except RouteFailed as error:
        raise Failure(
            "unavailable", "the server does not serve the change; see the route and the log", 1.0
        ) from error


async def order_rollout(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Start, pause, resume, promote or abort a rollout of the route."""
    route = _route(request)
    author = request.key.name if request.key else ""
    change = await gateway.uploads.json(request, gateway.settings.default_timeout_s, RolloutChange)
    try:
        return json_response(await route.order_rollout(change.order, change.candidate, change.steps, author))
    except RouteConflict as error:
        raise Failure("conflict", str(error)) from None
    except RouteRefused as error:
        raise invalid_request(str(error)) from None
    except RouteFailed as error:
        raise Failure("unavailable", "the rollout cannot be changed now; see the log", 1.0) from error


async def access(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return the permissions of the caller's key."""
    keys_needed, key = gateway.settings.requires_keys, request.key
    scopes = {*(key.scopes if key else ()), *(() if keys_needed else ("infer",))}
    return json_response(Access(keys_needed, key.name if key else None, sorted(scopes)))


async def metrics(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Return the metrics in Prometheus' text format."""
    # In a thread, because the page of several workers is read from their files.
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
    return json_response(SAMPLES_OF_TASKS)


def _route(request: GatewayRequest) -> RouteView:
    if request.model.route is None:
        raise Failure("no_route_control", f"this gateway does not control a route '{request.model.name}'")
    return request.model.route


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        run: the handler.
        need: the required key.
        answer: class of the response; None if the response is not JSON but has `response_type`.
        query: names of the query parameters.
        body: class of the JSON body.
        kinds: accepted media types of the body.
        errors: possible error codes, in addition to those of every operation.
        is_limited: whether quotas, rule headers and the timeout header apply.
        is_of_model: whether the operation is about one model: the default one, or the one in the path.
        task: the task that the model must have; None for any.
    """

    method: str
    path: str
    run: Callable[[Gateway, GatewayRequest], Awaitable[GatewayResponse]]
    need: Need
    answer: Any
    query: tuple[str, ...] = ()
    body: Any = None
    kinds: tuple[str, ...] = ()
    errors: tuple[Code, ...] = ()
    is_limited: bool = False
    is_of_model: bool = False
    response_type: str = "text/plain"
    task: GatewayTask | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The path, and for an operation of a model the path with a model's name."""
        if not self.is_of_model:
            return (self.path,)
        return self.path, f"/v1/models/{{model}}/{self.path.removeprefix('/v1').strip('/')}"


_BODY: tuple[Code, ...] = ("body_timeout", "too_large", "unsupported_media_type")
_SERVER: tuple[Code, ...] = (
    "overloaded",
    "inference_failed",
    "unavailable",
    "unreachable",
    "deadline_exceeded",
)
_IMAGE: tuple[Code, ...] = ("invalid_image", "not_found", *_BODY, "rate_limited", *_SERVER)
_ONE_IMAGE = ("image/*", "application/octet-stream", FORM, JSON)


def _of_one_image(
    task: GatewayTask, run: Any, answer: Any, query: tuple[str, ...], *errors: Code
) -> "Operation":
    return Operation(
        "POST",
        task.path,
        run,
        "infer",
        answer,
        query,
        ImageBody,
        _ONE_IMAGE,
        (*_IMAGE, *errors),
        is_limited=True,
        is_of_model=True,
        task=task,
    )


OPERATIONS = (
    _of_one_image(CLASSIFY, predict, Answer, PARAMETERS),
    Operation(
        "POST",
        "/v1/classify",
        classify_batch,
        "infer",
        BatchAnswer,
        PARAMETERS,
        BatchBody,
        (FORM, JSON),
        _IMAGE,
        is_limited=True,
        is_of_model=True,
        task=CLASSIFY,
    ),
    _of_one_image(READ, read, ReadAnswer, read_endpoints.PARAMETERS, "unencodable_text"),
    _of_one_image(WAYBILL, waybill, WaybillAnswer, read_endpoints.PARAMETERS, "unencodable_text"),
    _of_one_image(DETECT, detect, DetectAnswer, ROUTE_PARAMETERS),
    Operation(
        "POST",
        "/v1/preview",
        preview,
        "infer",
        None,
        kinds=_ONE_IMAGE,
        body=ImageBody,
        errors=("invalid_image", *_BODY, "rate_limited", "overloaded", "not_found", "deadline_exceeded"),
        is_limited=True,
        is_of_model=True,
        response_type="image/png",
    ),
    Operation("GET", "/v1/models", models, "infer", list[ModelName]),
    Operation(
        "GET",
        "/v1/fields",
        read_endpoints.fields,
        "infer",
        list[DocumentField],
        errors=("not_found",),
        is_of_model=True,
        task=WAYBILL,
    ),
    Operation("GET", "/v1/live", live, "infer", LiveState, is_of_model=True),
    Operation(
        "GET",
        "/v1/route",
        show_route,
        "infer",
        RouteState,
        errors=("no_route_control", "unavailable"),
        is_of_model=True,
    ),
    Operation(
        "PUT",
        "/v1/route/weights",
        set_weights,
        "route",
        RouteState,
        body=Weights,
        kinds=(JSON,),
        errors=("no_route_control", "conflict", "unavailable", *_BODY),
        is_of_model=True,
    ),
    Operation(
        "POST",
        "/v1/rollout",
        order_rollout,
        "route",
        RouteState,
        body=RolloutChange,
        kinds=(JSON,),
        errors=("no_route_control", "conflict", "unavailable", *_BODY),
        is_of_model=True,
    ),
    Operation(
        "POST",
        "/v1/publish",
        publish,
        "admin",
        PublishAnswer,
        PUBLISH_PARAMETERS,
        kinds=("application/octet-stream",),
        errors=("not_found", "conflict", "unavailable", *_BODY),
        is_of_model=True,
    ),
    Operation(
        "POST",
        "/v1/feedback",
        feedback,
        "infer",
        FeedbackAnswer,
        body=Feedback,
        kinds=(JSON,),
        errors=("unknown_request", "conflict", *_BODY),
    ),
    Operation("GET", "/v1/access", access, "open", Access),
    Operation("GET", "/metrics", metrics, "any", None),
    Operation("GET", "/healthz", healthz, "open", Health),
    Operation("GET", "/readyz", readyz, "open", Ready),
    Operation("GET", "/samples", samples, "open", list[Sample]),
)

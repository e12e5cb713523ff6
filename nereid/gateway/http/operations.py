"""The gateway's operations: one table for the routes, the keys they need, and the OpenAPI page."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from nereid.assets import SAMPLES
from nereid.gateway.admission.access import Need
from nereid.gateway.admission.keys import Scope
from nereid.gateway.answers import Answer, BatchAnswer
from nereid.gateway.failures import Code, Failure
from nereid.gateway.gateway_metrics import CONTENT_TYPE
from nereid.gateway.http.http_request import Exchange, Reply, json_reply
from nereid.gateway.http.upload import BatchBody, ImageBody
from nereid.gateway.live import LiveState
from nereid.gateway.predict import PARAMETERS, classify_batch, predict
from nereid.gateway.readiness import Health, Ready
from nereid.gateway.route_control import RouteConflict, RouteFailed, RouteRefused, RouteState, RouteView
from nereid.gateway.state import Gateway

CREDIT = {
    "coffee": "Rachel Michetti, courtesy of Pikolo Espresso Bar, CC0",
    "chelsea": "Stéfan van der Walt, CC0",
}


class Access(Struct):
    """What the caller may do."""

    keys_needed: bool
    name: str | None
    scopes: list[Scope]


class Weights(Struct, forbid_unknown_fields=True):
    """New weights by variant; with a generation, only if the route still has it."""

    weights: dict[str, float]
    generation: int | None = None


class Sample(Struct):
    """A photo to try."""

    name: str
    url: str
    credit: str


async def live(gateway: Gateway, exchange: Exchange) -> Reply:
    """Tell what happened in the last minute."""
    admission = gateway.admission
    return json_reply(gateway.live.state(admission.in_flight, admission.limit))


async def show_route(gateway: Gateway, exchange: Exchange) -> Reply:
    """Tell the route's variants and weights."""
    route = _route(gateway)
    try:
        return json_reply(await route.show())
    except RouteFailed as error:
        raise Failure("unavailable", "the route cannot be read", 1.0) from error


async def set_weights(gateway: Gateway, exchange: Exchange) -> Reply:
    """Change the weights of the route's variants."""
    route = _route(gateway)
    who = exchange.key.name if exchange.key else ""
    change = await gateway.uploads.json(exchange, gateway.settings.default_timeout_s, Weights)
    try:
        return json_reply(await route.set_weights(change.weights, change.generation, who))
    except RouteConflict as error:
        raise Failure("conflict", str(error)) from None
    except RouteRefused as error:
        raise Failure("invalid_request", str(error)) from None
    except RouteFailed as error:
        raise Failure("unavailable", "the change is not served; see the route, and the log", 1.0) from error


async def access(gateway: Gateway, exchange: Exchange) -> Reply:
    """Tell what the caller's key is for."""
    keys_needed, key = gateway.settings.asks_for_keys, exchange.key
    scopes = {*(key.scopes if key else ()), *(() if keys_needed else ("infer",))}
    return json_reply(Access(keys_needed, key.name if key else None, sorted(scopes)))


async def metrics(gateway: Gateway, exchange: Exchange) -> Reply:
    """Tell the metrics in Prometheus' text format."""
    return Reply(gateway.metrics.page(), CONTENT_TYPE)


async def healthz(gateway: Gateway, exchange: Exchange) -> Reply:
    """Tell that the process lives."""
    return json_reply(Health(True))


async def readyz(gateway: Gateway, exchange: Exchange) -> Reply:
    """Tell whether the server classifies an image."""
    ready = await gateway.readiness.ask()
    return json_reply(ready, 200 if ready.ready else 503)


async def samples(gateway: Gateway, exchange: Exchange) -> Reply:
    """List photos to try."""
    return json_reply([Sample(path.stem, f"/samples/{path.name}", CREDIT[path.stem]) for path in SAMPLES])


def _route(gateway: Gateway) -> RouteView:
    if gateway.route is None:
        raise Failure("no_route_control", "this gateway was started without control of a route")
    return gateway.route


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        run: does it.
        need: the key it takes.
        answer: what it answers when it can; None for no JSON.
        query: the names of its query's parameters.
        body: what its body holds as JSON.
        kinds: what media its body may have.
        errors: what it may answer instead, beside what every operation may.
        is_limited: it takes a token of its key's bucket, and images' headers and time limits hold for it.
    """

    method: str
    path: str
    run: Callable[[Gateway, Exchange], Awaitable[Reply]]
    need: Need
    answer: Any
    query: tuple[str, ...] = ()
    body: Any = None
    kinds: tuple[str, ...] = ()
    errors: tuple[Code, ...] = ()
    is_limited: bool = False


_BODY: tuple[Code, ...] = ("body_timeout", "too_large", "unsupported_media_type")
_SERVER: tuple[Code, ...] = (
    "overloaded",
    "inference_failed",
    "unavailable",
    "unreachable",
    "deadline_exceeded",
)
_IMAGE: tuple[Code, ...] = ("invalid_image", *_BODY, "rate_limited", *_SERVER)
_JSON, _FORM = "application/json", "multipart/form-data"
OPERATIONS = (
    Operation(
        "POST",
        "/predict",
        predict,
        "infer",
        Answer,
        PARAMETERS,
        ImageBody,
        ("image/*", "application/octet-stream", _FORM, _JSON),
        _IMAGE,
        True,
    ),
    Operation(
        "POST",
        "/v1/classify",
        classify_batch,
        "infer",
        BatchAnswer,
        PARAMETERS,
        BatchBody,
        (_FORM, _JSON),
        _IMAGE,
        True,
    ),
    Operation("GET", "/v1/live", live, "infer", LiveState),
    Operation(
        "GET", "/v1/route", show_route, "infer", RouteState, errors=("no_route_control", "unavailable")
    ),
    Operation(
        "PUT",
        "/v1/route/weights",
        set_weights,
        "route",
        RouteState,
        body=Weights,
        kinds=(_JSON,),
        errors=("no_route_control", "conflict", "unavailable", *_BODY),
    ),
    Operation("GET", "/v1/access", access, "open", Access),
    Operation("GET", "/metrics", metrics, "any", None),
    Operation("GET", "/healthz", healthz, "open", Health),
    Operation("GET", "/readyz", readyz, "open", Ready),
    Operation("GET", "/samples", samples, "open", list[Sample]),
)

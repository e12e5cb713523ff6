"""The operations of the gateway, and the REST endpoints of tasks, from which it builds their operations."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct

from nereid.base.assets import CHELSEA, COFFEE
from nereid.gateway.admission.access import Need
from nereid.gateway.failures import Code
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, json_response
from nereid.gateway.http.upload import FORM, JSON
from nereid.tasks import Task

if TYPE_CHECKING:
    from nereid.gateway.state import Gateway

Handler = Callable[["Gateway", GatewayRequest], Awaitable[GatewayResponse]]
# A query parameter: its description and its JSON schema.
Parameter = tuple[str, Mapping[str, Any]]

WORD = {"type": "string", "maxLength": 128, "pattern": r"^[ -~]*$"}
# The parameters of every task.
ROUTE_PARAMETERS: Mapping[str, Parameter] = {
    "variant": ("Variant of the route that answers; same as header x-variant.", WORD),
    "version": ("Version of the model that answers; same as header x-model-version.", WORD),
    "route_key": ("Route key: the same key gets the same variant; same as header x-route-key.", WORD),
}
# Accepted media types of one image.
ONE_IMAGE = ("image/*", "application/octet-stream", FORM, JSON)
BODY_ERRORS: tuple[Code, ...] = ("body_timeout", "too_large", "unsupported_media_type")
IMAGE_ERRORS: tuple[Code, ...] = (
    *("invalid_image", "not_found", *BODY_ERRORS, "rate_limited", "overloaded", "inference_failed"),
    *("unavailable", "unreachable", "deadline_exceeded"),
)


class TimingsMs(Struct):
    """Durations of the stages in milliseconds; `total` starts at the arrival of the request."""

    receive: float
    admission: float
    inference: float
    total: float


class Answered(Struct):
    """The first fields of an answer; the last one is `timings_ms: TimingsMs`."""

    request_id: str
    model: str
    variant: str
    version: str
    reason: str


class Photo(NamedTuple):
    """A sample image, and its credit."""

    path: Path
    credit: str


PHOTOS = (
    Photo(COFFEE, "Rachel Michetti, courtesy of Pikolo Espresso Bar, CC0"),
    Photo(CHELSEA, "Stéfan van der Walt, CC0"),
)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        run: the handler; its name is the operation's id, the first line of its docstring the summary.
        need: the required key.
        answer: class of the response; None if the response is not JSON but has `response_type`.
        query: the query parameters, by name.
        body: class of the JSON body.
        kinds: accepted media types of the body.
        errors: possible error codes, in addition to those of every operation.
        is_limited: whether quotas, rule headers and the timeout header apply.
        is_of_model: whether the operation is about one model: the default one, or the one in the path.
        task: the task that the model must have; None for any.
        parts: further classes that the schema of the answer refers to.
    """

    method: str
    path: str
    run: Handler
    need: Need
    answer: Any
    query: Mapping[str, Parameter] = field(default_factory=dict)
    body: Any = None
    kinds: tuple[str, ...] = ()
    errors: tuple[Code, ...] = ()
    is_limited: bool = False
    is_of_model: bool = False
    response_type: str = "text/plain"
    task: Task | None = None
    parts: tuple[type, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The path, and for an operation of a model the path with a model's name."""
        if not self.is_of_model:
            return (self.path,)
        return self.path, f"/v1/models/{{model}}/{self.path.removeprefix('/v1').strip('/')}"


def _as_json(answer: Any, given: Mapping[str, str]) -> GatewayResponse:
    return json_response(answer)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The REST endpoint of a task: it runs a model on one image, and answers with the result.

    The gateway reads and checks the image and the parameters. The face `result` of the task reads the
    response of the model.

    Attributes:
        summary: one line for the OpenAPI document: `Find the objects in one image.`
        answer: class of the answer: `Answered`, then the fields of the task, then `timings_ms`.
        values: returns the values of the task's fields, from a result and the parameters of the request.
        parameters: all query parameters by name. A value is checked against `enum`, in lower case, and
            against the `maximum` of an `integer`; the integer `top_k` reaches Triton's classification.
        errors: error codes, in addition to those of every image.
        photos: sample images that suit the task.
        operations: further operations of the task; of those that are about a model, it must have the task.
        respond: encodes an answer, from the parameters of the request; raises Failure.
        keep: called with each result before it is encoded.
    """

    summary: str
    answer: type[Answered]
    values: Callable[[Any, Mapping[str, str]], tuple[Any, ...]]
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: ROUTE_PARAMETERS)
    errors: tuple[Code, ...] = ()
    photos: tuple[Photo, ...] = ()
    operations: tuple[Operation, ...] = ()
    respond: Callable[[Any, Mapping[str, str]], GatewayResponse] = _as_json
    keep: Callable[["Gateway", GatewayRequest, Any], None] | None = None

"""Images over REST, for every task: its endpoint, and the path from request body to response."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct, ValidationError, convert, structs

from nereid.base.assets import CHELSEA, COFFEE
from nereid.base.task import Task
from nereid.gateway.failures import Code, invalid_request, malformed_response
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, json_response, whole_number
from nereid.gateway.http.upload import FORM, JSON, ImageBody, cancel_on_disconnect
from nereid.gateway.inference import ImageInference, run_inference
from nereid.gateway.keys import RequiredScope
from nereid.vision.imaging.formats.image_header import estimate_header_cost, read_header

if TYPE_CHECKING:
    from nereid.gateway.state import Gateway

Handler = Callable[["Gateway", GatewayRequest], Awaitable[GatewayResponse]]
# Encodes an answer, given the request's parameters, its image and the image's cost.
Respond = Callable[
    ["Gateway", GatewayRequest, Any, Mapping[str, str], memoryview, int], Awaitable[GatewayResponse]
]
_Value = TypeVar("_Value")
# A query parameter: its description and JSON schema.
Parameter = tuple[str, Mapping[str, Any]]

WORD_SCHEMA = {"type": "string", "maxLength": 128, "pattern": r"^[ -~]*$"}
# Parameters that every task accepts.
ROUTE_PARAMETERS: dict[str, Parameter] = {
    "variant": ("Variant of the route that answers; same as header x-variant.", WORD_SCHEMA),
    "version": ("Version of the model that answers; same as header x-model-version.", WORD_SCHEMA),
    "route_key": ("Route key: the same key gets the same variant; same as header x-route-key.", WORD_SCHEMA),
}
DEFAULT_TOP_K = 5
# Sample images and their credits.
PHOTOS = {
    COFFEE: "Rachel Michetti, courtesy of Pikolo Espresso Bar, CC0",
    CHELSEA: "Stéfan van der Walt, CC0",
}
# Media types accepted for a single image.
IMAGE_MEDIA_TYPES = ("image/*", "application/octet-stream", FORM, JSON)
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


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        run: the handler; its name is the operation's id, the first line of its docstring the summary.
        response_class: class of the response; None if the response is not JSON but has `response_media_type`.
        media_types: media types accepted for the body.
        errors: possible error codes, in addition to those common to all operations.
        is_limited: whether quotas, rule headers and the timeout header apply.
        is_of_model: whether the operation concerns one model: the default one, or the one in the path.
        other_media_type: response media type that parameters can select instead of JSON; empty for none.
        task: the task that the model must have; None for any.
        parts: additional classes that the schema of the answer refers to.
    """

    method: str
    path: str
    run: Handler
    need: RequiredScope
    response_class: Any
    query: Mapping[str, Parameter] = field(default_factory=dict)
    body: Any = None
    media_types: tuple[str, ...] = ()
    errors: tuple[Code, ...] = ()
    is_limited: bool = False
    is_of_model: bool = False
    response_media_type: str = "text/plain"
    other_media_type: str = ""
    task: Task | None = None
    parts: tuple[type, ...] = ()

    @property
    def paths(self) -> tuple[str, ...]:
        """The path and, for a model operation, also the path with a model's name."""
        if not self.is_of_model:
            return (self.path,)
        return self.path, f"/v1/models/{{model}}/{self.path.removeprefix('/v1').strip('/')}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A task's REST endpoint: runs a model on one image and responds with the result.

    The gateway reads and checks the image and the parameters. The task's entry point `result` reads
    the model's response.

    Attributes:
        summary: one line for the OpenAPI document: `Find the objects in one image.`
        response_class: class of the answer: `Answered`, then the fields of the task, then `timings_ms`.
        values: returns the values of the task's fields, given a result and the request's parameters;
            by default, the attributes of the result with the same names.
        parameters: all query parameters by name. A value is checked against `enum`, in lower case, and
            against the `maximum` of an `integer`; the integer `top_k` is passed to Triton's classification.
        errors: error codes, in addition to those common to all images.
        photos: sample images that suit the task, with their credits.
        operations: additional operations of the task; for a model operation, the model must have the task.
        media_types: media types accepted for the body.
        respond: encodes an answer and may raise Failure; None encodes it as JSON.
        other_media_type: media type that `respond` can choose instead of JSON.
        on_result: called with each result before it is encoded.
    """

    summary: str
    response_class: type[Any]
    values: Callable[[Any, Mapping[str, str]], tuple[Any, ...]] | None = None
    parameters: Mapping[str, Parameter] = field(default_factory=ROUTE_PARAMETERS.copy)
    errors: tuple[Code, ...] = ()
    photos: Mapping[Path, str] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()
    media_types: tuple[str, ...] = IMAGE_MEDIA_TYPES
    respond: Respond | None = None
    other_media_type: str = ""
    on_result: Callable[["Gateway", GatewayRequest, Any], None] | None = None


def operations_of(task: Task) -> Iterator[Operation]:
    """Yield a task's operations; the first one runs it on the image of a request."""
    endpoint: Endpoint = task.entry_point("endpoint")
    yield Operation(
        "POST",
        task.path,
        _handler(task, endpoint),
        "infer",
        endpoint.response_class,
        query=endpoint.parameters,
        body=ImageBody,
        media_types=endpoint.media_types,
        errors=(*IMAGE_ERRORS, *endpoint.errors),
        other_media_type=endpoint.other_media_type,
        is_limited=True,
        is_of_model=True,
        task=task,
    )
    for operation in endpoint.operations:
        yield replace(operation, task=task) if operation.is_of_model else operation


def _handler(task: Task, endpoint: Endpoint) -> Handler:
    """Return the handler that runs a task on the image of a request."""
    result_kind = task.entry_point("result")
    fields = structs.fields(endpoint.response_class)[len(Answered.__struct_fields__) : -1]

    def attributes(result: Any, _: Mapping[str, str]) -> tuple[Any, ...]:
        try:
            return tuple(
                convert(getattr(result, part.name), part.type, from_attributes=True) for part in fields
            )
        except ValidationError as error:
            raise malformed_response(error) from error

    values = endpoint.values or attributes

    async def answer(gateway: "Gateway", request: GatewayRequest) -> GatewayResponse:
        settings, query_parameters = gateway.settings, parameters(request, endpoint.parameters)
        headers = request.forwarded(query_parameters)
        remaining_s = request.start_timeout(settings.default_timeout_s, settings.max_timeout_s)
        gateway.admission.check(remaining_s, request.key_id)
        image = await gateway.uploads.read_image(request, remaining_s)
        received_s = request.end_stage("receive")
        image_header = read_header(image)
        cost, request_id = estimate_header_cost(image_header, settings.max_pixels), request.request_id
        inference = ImageInference(
            request.model,
            result_kind,
            image,
            image_header,
            cost,
            headers,
            request_id,
            top_k=top_k_of(query_parameters),
            debt=cost - 1,
            convert=lambda result: values(result, query_parameters),
        )
        with cancel_on_disconnect(request):
            result = await run_inference(gateway, request, inference)
        request.variant = inference.variant
        if endpoint.on_result:
            endpoint.on_result(gateway, request, result)
        timings_ms = timings(request, received_s, inference.stages_s)
        reply = endpoint.response_class(request_id, *source_of(result), *inference.values, timings_ms)
        if endpoint.respond:
            return await endpoint.respond(gateway, request, reply, query_parameters, image, cost)
        return json_response(reply)

    # The operation's id and summary.
    answer.__name__, answer.__doc__ = task.path.rpartition("/")[2], endpoint.summary
    return answer


async def run_in_limited_thread(
    gateway: "Gateway", request: GatewayRequest, cost: int, function: Callable[[], _Value]
) -> _Value:
    """Run an image function in a thread, only one at a time because inferences have priority.

    Args:
        request: the image's request, whose key is charged for the time.
        cost: expected cost, in units of a small photo.
        function: runs to completion, even if nobody is waiting for it any more.

    Raises:
        Failure: the request is late, or its key has too many requests waiting.
    """
    slot = await gateway.previews.acquire(request.remaining_s(), request.key_id, [cost], request.model.name)

    def end(running: "asyncio.Task[_Value]") -> None:
        is_answered = running.exception() is None
        gateway.quotas.take(request.key, slot.measure(is_answered), is_debt=True)
        slot.release()

    running = asyncio.create_task(asyncio.to_thread(function))
    running.add_done_callback(end)
    try:
        async with asyncio.timeout(request.remaining_s()):
            return await asyncio.shield(running)
    except TimeoutError:
        raise request.deadline_failure() from None


def parameters(request: GatewayRequest, known: Mapping[str, Parameter]) -> dict[str, str]:
    """Return the parameters in a request's query string.

    Raises:
        Failure: a parameter is unknown or repeated, or its value does not match its schema.
    """
    query_parameters = request.query(known)
    for name, value in query_parameters.items():
        schema = known[name][1]
        if schema["type"] == "integer":
            whole_number(name, value, schema["maximum"])
        elif "enum" in schema:
            query_parameters[name] = value.lower()
            if query_parameters[name] not in schema["enum"]:
                expected = ", ".join(schema["enum"])
                raise invalid_request(
                    f"{name} must be one of {expected}, got {query_parameters[name][:32]!r}"
                )
    return query_parameters


def top_k_of(query_parameters: Mapping[str, str]) -> int:
    """Return the number of classes that a request's parameters ask for."""
    return int(query_parameters.get("top_k", DEFAULT_TOP_K))


def source_of(result: Any) -> tuple[str, str, str, str]:
    """Return a result's model, variant, version and reason, in the order used in answers."""
    return result.model, result.variant, result.version, result.reason


def timings(request: GatewayRequest, received_s: float, stages_s: Mapping[str, float]) -> TimingsMs:
    """Return the durations of the stages so far, and since the request arrived."""
    durations_s = received_s, stages_s["admission"], stages_s["inference"], request.elapsed_s()
    return TimingsMs(*[round(seconds * 1e3, 3) for seconds in durations_s])

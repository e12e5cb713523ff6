"""`POST /predict`, `/v1/classify` and `/v1/feedback`: the classes of images, and which were right."""

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Annotated, Any

from msgspec import Meta, Struct

from nereid.gateway.failures import (
    GATEWAY_FAILED,
    SERVER_FAULTS,
    SERVER_OUTCOMES,
    Failure,
    Reason,
    invalid_request,
)
from nereid.gateway.http.http_request import MAX_ID_LENGTH, GatewayRequest, GatewayResponse, json_response
from nereid.gateway.http.middleware import log
from nereid.gateway.http.upload import FORM, JSON, MAX_TOP_K, BatchBody, BatchImage, cancel_on_disconnect
from nereid.gateway.inference import ImageInference, run_inference
from nereid.gateway.state import Gateway
from nereid.gateway.task_endpoint import (
    BODY_ERRORS,
    IMAGE_ERRORS,
    PHOTOS,
    ROUTE_PARAMETERS,
    Answered,
    Endpoint,
    Operation,
    Parameter,
    TimingsMs,
    parameters,
    source_of,
    timings,
    top_k_of,
)
from nereid.tasks.classify.result import PREDICTIONS, Prediction
from nereid.vision.imaging.formats.image_header import LARGE_COST, estimate_header_cost, read_header

PARAMETERS: Mapping[str, Parameter] = {
    "top_k": (
        "Number of classes in the response, best first.",
        {"type": "integer", "minimum": 1, "maximum": MAX_TOP_K},
    ),
    **ROUTE_PARAMETERS,
}
MAX_LABEL = 1024


class Score(Struct):
    """One class: label, index among all classes, and score, a probability in 0..1."""

    label: str
    index: int
    score: float


class Answer(Answered):
    """The best classes of one image, best first, and the variant that answered."""

    predictions: list[Score]
    timings_ms: TimingsMs


class Result(Struct):
    """The best classes of one image of a batch."""

    id: str | int
    model: str
    variant: str
    version: str
    reason: str
    predictions: list[Score]
    timings_ms: TimingsMs


class FailedResult(Struct):
    """An image of a batch that was not classified."""

    id: str | int
    error: Reason


# msgspec cannot generate a schema for two Structs without a tag.
_RESULT = {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Result", "FailedResult")]}


class BatchAnswer(Struct):
    """The results of a batch, in the order of its images."""

    request_id: str
    results: Annotated[list[Any], Meta(extra_json_schema={"items": _RESULT})]


class Feedback(Struct, forbid_unknown_fields=True):
    """The true class of an image: its label, or its index among all classes.

    `image` is the id, or the position, of an image of a batch.
    """

    request_id: Annotated[str, Meta(min_length=1, max_length=MAX_ID_LENGTH)]
    label: Annotated[str, Meta(min_length=1, max_length=MAX_LABEL)] | Annotated[int, Meta(ge=0, lt=2**31)]
    image: Annotated[str, Meta(max_length=MAX_LABEL)] | int | None = None


class FeedbackAnswer(Struct):
    """The answer that the feedback is about, and whether its best class was correct."""

    request_id: str
    model: str
    variant: str
    correct: bool


async def classify_batch(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Classify several images; each image is admitted, and can fail, on its own."""
    settings = gateway.settings
    remaining_s = request.start_timeout(settings.default_timeout_s, settings.max_timeout_s)
    query = parameters(request, PARAMETERS)
    gateway.admission.check(remaining_s, request.key_id)
    batch = await gateway.uploads.read_batch(request, remaining_s)
    received_s = request.end_stage("receive")
    image_headers = [read_header(image.image) for image in batch.images]
    costs = [estimate_header_cost(header, settings.max_pixels) for header in image_headers]
    gateway.quotas.take(request.key, sum(costs) - 1, is_debt=True)
    query_parameters = merged(query, batch)
    headers, top_k = request.forwarded(query_parameters), top_k_of(query_parameters)
    # A batch leaves half of the slots free for other requests.
    slots = asyncio.Semaphore(max(1, gateway.admission.limit // 2))
    # Large images are processed one at a time anyway, and only a few per key may wait.
    large = asyncio.Semaphore(1)
    failures: list[Failure] = []

    async def outcome(position: int, image: BatchImage) -> Result | FailedResult:
        name = position if image.id is None else image.id
        image_header, cost = image_headers[position], costs[position]
        inference = ImageInference(
            request.model, PREDICTIONS, image.image, image_header, cost, headers, request.request_id, top_k
        )
        async with large if cost >= LARGE_COST else nullcontext(), slots:
            try:
                prediction = await run_inference(gateway, request, inference)
            except Exception as error:
                failures.append(_as_failure(error))
                return FailedResult(name, failures[-1].reason)
        remember(gateway, request, prediction, name)
        return Result(
            name, *source_of(prediction), scores(prediction), timings(request, received_s, inference.stages_s)
        )

    with cancel_on_disconnect(request):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(outcome(*image)) for image in enumerate(batch.images)]
    _report_faults(request, failures, len(tasks))
    return json_response(BatchAnswer(request.request_id, [task.result() for task in tasks]))


def _as_failure(error: Exception) -> Failure:
    if isinstance(error, Failure):
        return error
    failure = Failure("inference_failed", GATEWAY_FAILED)
    failure.__cause__ = error
    return failure


def _report_faults(request: GatewayRequest, failures: list[Failure], count: int) -> None:
    """Log server faults; if the server failed every image, the whole batch fails.

    Raises:
        Failure: the failure of one image, if the server failed all of them.
    """
    faults = [failure for failure in failures if failure.code in SERVER_FAULTS]
    if len(failures) == count and all(failure.code in SERVER_OUTCOMES for failure in failures):
        raise (faults or failures)[0]
    for fault in faults:
        log.warning("request %s: %s: %r", request.request_id, fault.code, fault.__cause__)
        request.outcome = fault.code


def merged(query: Mapping[str, str], batch: BatchBody) -> dict[str, str]:
    """Merge the parameters of the query and the body.

    Raises:
        Failure: the query and the body disagree.
    """
    merged_parameters = dict(query)
    for name in PARAMETERS:
        value = getattr(batch, name)
        if value not in (None, "") and merged_parameters.setdefault(name, str(value)) != str(value):
            raise invalid_request(
                f"{name} is {merged_parameters[name]!r} in the query, but {value!r} in the body"
            )
    return merged_parameters


def scores(prediction: Prediction) -> list[Score]:
    """Return the classes of a prediction."""
    return [Score(label.name, label.index, label.score) for label in prediction.labels]


def remember(
    gateway: Gateway, request: GatewayRequest, prediction: Prediction, image: str | int | None = None
) -> None:
    """Remember the best class of an answer so that feedback can refer to it."""
    if prediction.labels:
        best, name = prediction.labels[0], _name(request.key_id, request.request_id, image)
        variant = gateway.metrics.variant_label(prediction.variant)
        gateway.recent_predictions.remember(name, request.model.name, variant, best.index, best.name)


async def feedback(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Compare an answer to the same key with the true class, and count the result once."""
    body = await gateway.uploads.read_json(request, Feedback)
    rated = gateway.recent_predictions.rate(_name(request.key_id, body.request_id, body.image), body.label)
    if rated is None:
        raise Failure(
            "unknown_request",
            f"unknown request {body.request_id!r}: the id is wrong, or the answer has expired",
        )
    if not rated.is_first:
        raise Failure("conflict", f"feedback for request {body.request_id!r} has already been counted")
    gateway.metrics.count_feedback(rated.model, rated.variant, rated.is_correct)
    return json_response(FeedbackAnswer(body.request_id, rated.model, rated.variant, rated.is_correct))


def _name(key_id: str, request_id: str, image: str | int | None) -> str:
    # Callers choose the ids, so another key may have used the same one. An image's id and its position are
    # different names, as in the body of a batch.
    return f"{key_id}\0{request_id}" if image is None else f"{key_id}\0{request_id}\0{image!r}"


_BATCH = Operation(
    *("POST", "/v1/classify", classify_batch, "infer", BatchAnswer, PARAMETERS, BatchBody, (FORM, JSON)),
    IMAGE_ERRORS,
    is_limited=True,
    is_of_model=True,
    parts=(Result, FailedResult),
)
_FEEDBACK = Operation(
    *("POST", "/v1/feedback", feedback, "infer", FeedbackAnswer),
    body=Feedback,
    media_types=(JSON,),
    errors=("unknown_request", "conflict", *BODY_ERRORS),
)
CLASSIFY = Endpoint(
    "Classify one image.",
    Answer,
    lambda prediction, query_parameters: (scores(prediction),),
    PARAMETERS,
    photos=PHOTOS,
    operations=(_BATCH, _FEEDBACK),
    on_result=remember,
)

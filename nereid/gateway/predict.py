"""Images by REST: from the body of a request to the result of a model, for every task."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from nereid.gateway.answer_memory import remember
from nereid.gateway.answers import Answer, BatchAnswer, FailedResult, Result, Score, TimingsMs
from nereid.gateway.failures import FAULTS, GATEWAY_FAILED, SERVER_OUTCOMES, Failure, invalid_request
from nereid.gateway.gateway_task import CLASSIFY, GatewayTask
from nereid.gateway.http.http_request import (
    OPTIONS,
    GatewayRequest,
    GatewayResponse,
    json_response,
    whole_number,
)
from nereid.gateway.http.middleware import log
from nereid.gateway.http.upload import MAX_TOP_K, BatchBody, BatchImage, CancelOnDisconnect
from nereid.gateway.inference import ImageCall, run
from nereid.gateway.state import Gateway
from nereid.tasks.classify.result import Prediction
from nereid.vision.imaging.formats.size import read_size
from nereid.vision.imaging.formats.work import LARGE_WORK, work_of

ROUTE_PARAMETERS = tuple(OPTIONS)
PARAMETERS = ("top_k", *ROUTE_PARAMETERS)
DEFAULT_TOP_K = 5


async def predict(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Classify one image."""
    found, timings_ms = await answer_one(gateway, request, CLASSIFY, request.query(PARAMETERS))
    remember(gateway, request, found)
    source = found.model, found.variant, found.version, found.reason
    return json_response(Answer(request.request_id, *source, _scores(found), timings_ms))


async def answer_one(
    gateway: Gateway, request: GatewayRequest, task: GatewayTask, given: Mapping[str, str]
) -> tuple[Any, TimingsMs]:
    """Read the image of a request, and run the request's model; return the result and the timings.

    Args:
        gateway: limits and models.
        request: the request.
        task: its task.
        given: its parameters.

    Raises:
        Failure: the body is invalid, or the image was not admitted, or the model failed.
        ClientClosed: the client has disconnected.
    """
    settings = gateway.settings
    headers = request.forwarded(given)
    top_k = _top_k(given) if "top_k" in given else DEFAULT_TOP_K
    left_s = request.start_timeout(settings.default_timeout_s, settings.max_timeout_s)
    gateway.admission.check(left_s, request.owner)
    image = await gateway.uploads.one(request, left_s)
    received_s = request.end_stage("receive")
    size = read_size(image)
    work, name = work_of(size, settings.max_pixels), request.request_id
    call = ImageCall(request.model, task.kind, image, size, work, headers, name, top_k, work - 1)
    with CancelOnDisconnect(request):
        result = await run(gateway, request, call)
    request.variant = call.variant
    return result, _timings_ms(request, received_s, call.stages_s)


async def classify_batch(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Classify several images; each image is admitted, and can fail, on its own."""
    settings = gateway.settings
    left_s = request.start_timeout(settings.default_timeout_s, settings.max_timeout_s)
    query = request.query(PARAMETERS)
    gateway.admission.check(left_s, request.owner)
    batch = await gateway.uploads.several(request, left_s)
    received_s = request.end_stage("receive")
    sizes = [read_size(each.image) for each in batch.images]
    work = [work_of(size, settings.max_pixels) for size in sizes]
    gateway.quotas.take(request.key, sum(work) - 1, is_debt=True)
    given = merged(query, batch)
    headers, top_k = request.forwarded(given), _top_k(given)
    # A batch leaves half of the slots to other requests.
    slots = asyncio.Semaphore(max(1, gateway.admission.limit // 2))
    # Large images go one at a time anyway, and few of a key may wait.
    large = asyncio.Semaphore(1)
    failures: list[Failure] = []

    async def outcome(position: int, image: BatchImage) -> Result | FailedResult:
        name = position if image.id is None else image.id
        image_file = image.image, sizes[position], work[position]
        call = ImageCall(request.model, CLASSIFY.kind, *image_file, headers, request.request_id, top_k)
        async with large if work[position] >= LARGE_WORK else nullcontext(), slots:
            try:
                found = await run(gateway, request, call)
            except Exception as error:
                failures.append(_as_failure(error))
                return FailedResult(name, failures[-1].reason)
        remember(gateway, request, found, name)
        source = found.model, found.variant, found.version, found.reason
        timings_ms = _timings_ms(request, received_s, call.stages_s)
        return Result(name, *source, _scores(found), timings_ms)

    with CancelOnDisconnect(request):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(outcome(*each)) for each in enumerate(batch.images)]
    _report_faults(request, failures, len(tasks))
    return json_response(BatchAnswer(request.request_id, [task.result() for task in tasks]))


def _as_failure(error: Exception) -> Failure:
    if isinstance(error, Failure):
        return error
    failure = Failure("inference_failed", GATEWAY_FAILED)
    failure.__cause__ = error
    return failure


def _report_faults(request: GatewayRequest, failures: list[Failure], count: int) -> None:
    """Log faults of the server; a batch in which every image failed because of the server fails as a whole.

    Raises:
        Failure: the failure of one image, if the server failed all of them.
    """
    faults = [failure for failure in failures if failure.code in FAULTS]
    if len(failures) == count and all(failure.code in SERVER_OUTCOMES for failure in failures):
        raise (faults or failures)[0]
    for fault in faults:
        log.warning("request %s: %s: %r", request.request_id, fault.code, fault.__cause__)
        request.outcome = fault.code


def merged(query: dict[str, str], batch: BatchBody) -> dict[str, str]:
    """Merge the parameters of query and body.

    Raises:
        Failure: query and body disagree.
    """
    given = dict(query)
    for name in PARAMETERS:
        value = getattr(batch, name)
        if value in (None, ""):
            continue
        if given.setdefault(name, str(value)) != str(value):
            raise invalid_request(f"{name} is {given[name]!r} in the query, but {value!r} in the body")
    return given


def _top_k(given: Mapping[str, str]) -> int:
    return whole_number("top_k", given["top_k"], MAX_TOP_K) if "top_k" in given else DEFAULT_TOP_K


def _scores(found: Prediction) -> list[Score]:
    scores = []
    for label in found.labels:
        scores.append(Score(label.name, label.index, label.score))
    return scores


def _timings_ms(request: GatewayRequest, received_s: float, stages_s: dict[str, float]) -> TimingsMs:
    """Return the durations of the stages so far."""
    admission_ms, inference_ms = stages_s["admission"] * 1e3, stages_s["inference"] * 1e3
    total_ms = (time.perf_counter() - request.began_s) * 1e3
    return TimingsMs(
        round(received_s * 1e3, 3), round(admission_ms, 3), round(inference_ms, 3), round(total_ms, 3)
    )

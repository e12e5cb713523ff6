"""`POST /predict` and `POST /v1/classify`: from a request body to a response."""

import asyncio
from contextlib import nullcontext

from nereid.client.request import Options
from nereid.gateway import image_size as images
from nereid.gateway.answers import Answer, BatchAnswer, FailedResult, Result, answer
from nereid.gateway.failures import Failure, invalid_request
from nereid.gateway.feedback import remember
from nereid.gateway.http.http_request import GatewayRequest, GatewayResponse, json_response, whole_number
from nereid.gateway.http.middleware import FAULTS, log
from nereid.gateway.http.upload import MAX_TOP_K, BatchBody, BatchImage
from nereid.gateway.state import Gateway
from nereid.gateway.tasks import one_image
from nereid.gateway.tasks.gateway_task import CLASSIFY
from nereid.gateway.tasks.one_image import answer_one, cancelled_on_disconnect, infer, timings_ms

PARAMETERS = ("top_k", *one_image.PARAMETERS)
# Outcomes that the server or its load caused, not the image.
SERVER_OUTCOMES = FAULTS | {"overloaded", "deadline_exceeded"}


async def predict(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Classify one image."""
    options = read_options(request, request.query(PARAMETERS))
    prediction, timings = await answer_one(gateway, request, CLASSIFY, options)
    remember(gateway, request, prediction)
    return json_response(answer(Answer, request.request_id, prediction, timings))


async def classify_batch(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Classify several images; each image is admitted, and can fail, on its own."""
    settings = gateway.settings
    timeout_s = request.timeout_s(settings.default_timeout_s, settings.max_timeout_s)
    query = request.query(PARAMETERS)
    gateway.admission.check(timeout_s - request.elapsed_s(), request.owner)
    batch = await gateway.uploads.several(request, timeout_s - request.elapsed_s())
    received_s = request.end_stage("receive")
    work = [images.work(each.image, settings.max_pixels) for each in batch.images]
    gateway.quotas.take(request.key, sum(work) - 1, is_debt=True)
    options = read_options(request, merged(query, batch))
    # A batch leaves half of the slots to other requests.
    slots = asyncio.Semaphore(max(1, gateway.admission.limit // 2))
    # Large images go one at a time anyway, and few of a key may wait.
    large = asyncio.Semaphore(1)
    failures: list[Failure] = []

    async def outcome(position: int, image: BatchImage) -> Result | FailedResult:
        name = position if image.id is None else image.id
        is_large = work[position] >= images.LARGE_WORK
        async with large if is_large else nullcontext(), slots:
            try:
                found, stages_s = await infer(
                    gateway, request, CLASSIFY, image.image, is_large, options, timeout_s
                )
            except Exception as error:
                failures.append(_as_failure(error))
                return FailedResult(name, failures[-1].reason)
        remember(gateway, request, found, name)
        return answer(Result, name, found, timings_ms(request, received_s, stages_s))

    async with cancelled_on_disconnect(request), asyncio.TaskGroup() as group:
        tasks = [group.create_task(outcome(position, image)) for position, image in enumerate(batch.images)]
    _report_faults(request, failures, len(tasks))
    return json_response(BatchAnswer(request.request_id, [task.result() for task in tasks]))


def _as_failure(error: Exception) -> Failure:
    if isinstance(error, Failure):
        return error
    failure = Failure("inference_failed", "the gateway failed; its log has the request id")
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


def read_options(request: GatewayRequest, given: dict[str, str]) -> Options:
    """Return the options of a classification from parameters and headers.

    Raises:
        Failure: a value is invalid, or parameter and header disagree.
    """
    top_k = whole_number("top_k", given.get("top_k", "5"), MAX_TOP_K)
    return {**one_image.read_options(request, given), "top_k": top_k}


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

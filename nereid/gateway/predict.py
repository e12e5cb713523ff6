"""`POST /predict` and `POST /v1/classify`: from a request body to a response."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, nullcontext
from typing import TypeVar

from nereid.client.classifier_errors import ClassifierError, Overloaded
from nereid.client.prediction import Prediction
from nereid.client.request import Options
from nereid.contract import OPTION_HEADERS, ROUTE_HEADER_PREFIX
from nereid.gateway import image_size as images
from nereid.gateway.answers import Answer, BatchAnswer, FailedResult, Result, TimingsMs, answer
from nereid.gateway.failures import Failure, from_classifier, invalid_request
from nereid.gateway.http.http_request import (
    ROUTE_PREFIX,
    GatewayRequest,
    GatewayResponse,
    json_response,
    whole_number,
)
from nereid.gateway.http.middleware import FAULTS, log
from nereid.gateway.http.tracing import is_word
from nereid.gateway.http.upload import MAX_TOP_K, BatchBody, BatchImage, ClientClosed
from nereid.gateway.state import CLIENT_CLOSED, Gateway

Value = TypeVar("Value")
PARAMETERS = ("top_k", "variant", "version", "route_key")
HEADERS = {name: header.encode() for name, header in OPTION_HEADERS.items()}
# gRPC rejects other names, and decodes values of `-bin` names as base64.
_RULE_HEADER = re.compile(rf"{ROUTE_HEADER_PREFIX}[a-z0-9-]{{1,56}}(?<!-bin)")
# Triton's gRPC takes 8 KiB of metadata.
MAX_RULE_HEADERS = 16
# Outcomes that the server or its load caused, not the image.
SERVER_OUTCOMES = FAULTS | {"overloaded", "deadline_exceeded"}


async def predict(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Classify one image."""
    settings = gateway.settings
    timeout_s = request.timeout_s(settings.default_timeout_s, settings.max_timeout_s)
    options = read_options(request, request.query(PARAMETERS))
    gateway.admission.check(timeout_s - request.elapsed_s(), request.owner)
    image = await gateway.uploads.one(request, timeout_s - request.elapsed_s())
    received_s = request.stages_s["receive"] = request.elapsed_s()
    work = images.work(image, settings.max_pixels)
    gateway.quotas.take(request.key, work - 1, is_debt=True)
    is_large = work > images.LARGE_WORK
    async with cancelled_on_disconnect(request):
        prediction, stages_s = await classify(gateway, request, image, is_large, options, timeout_s)
    request.variant = gateway.metrics.variant(prediction.variant)
    timings = timings_ms(request, received_s, stages_s)
    return json_response(answer(Answer, request.request_id, prediction, timings))


async def classify_batch(gateway: Gateway, request: GatewayRequest) -> GatewayResponse:
    """Classify several images; each image is admitted, and can fail, on its own."""
    settings = gateway.settings
    timeout_s = request.timeout_s(settings.default_timeout_s, settings.max_timeout_s)
    query = request.query(PARAMETERS)
    gateway.admission.check(timeout_s - request.elapsed_s(), request.owner)
    batch = await gateway.uploads.several(request, timeout_s - request.elapsed_s())
    received_s = request.stages_s["receive"] = request.elapsed_s()
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
        is_large = work[position] > images.LARGE_WORK
        async with large if is_large else nullcontext(), slots:
            try:
                found, stages_s = await classify(gateway, request, image.image, is_large, options, timeout_s)
            except Exception as error:
                failures.append(_as_failure(error))
                return FailedResult(name, failures[-1].reason)
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


async def classify(
    gateway: Gateway,
    request: GatewayRequest,
    image: bytes,
    is_large: bool,
    options: Options,
    timeout_s: float,
) -> tuple[Prediction, dict[str, float]]:
    """Classify one image within the admission limit; return the prediction and the seconds of each stage.

    Raises:
        Failure: the image is too large, was not admitted, or could not be classified.
    """
    stages_s = {"admission": 0.0}
    outcome, variant = "inference_failed", ""
    try:
        prediction = await _admitted(gateway, request, image, is_large, options, timeout_s, stages_s)
        outcome, variant = "ok", gateway.metrics.variant(prediction.variant)
    except Failure as failure:
        outcome = failure.code
        raise
    except asyncio.CancelledError:
        outcome = CLIENT_CLOSED
        raise
    finally:
        request.images += 1
        gateway.count_image(request.endpoint, request.model, variant, outcome, stages_s)
    return prediction, stages_s


async def _admitted(
    gateway: Gateway,
    request: GatewayRequest,
    image: bytes,
    is_large: bool,
    options: Options,
    timeout_s: float,
    stages_s: dict[str, float],
) -> Prediction:
    settings, admission = gateway.settings, gateway.admission
    if not image:
        raise Failure("invalid_image", "the image is empty")
    images.check(image, settings.max_pixels, settings.max_side_px)
    waiting = admission.take(_left_s(request, timeout_s), request.owner, is_large)
    slot = await _timed(stages_s, "admission", waiting)
    try:
        sent: Options = {**options, "timeout_s": _left_s(request, timeout_s)}
        prediction = await _timed(stages_s, "inference", request.model.upstream.classify(image, **sent))
    except asyncio.CancelledError:
        asyncio.get_running_loop().call_later(slot.rest_s(), slot.release)
        raise
    except ClassifierError as error:
        if isinstance(error, Overloaded):
            slot.rejected()
        slot.release()
        raise from_classifier(error, timeout_s, admission.retry_after_s()) from error
    except BaseException:
        slot.release()
        raise
    slot.answered()
    return prediction


async def _timed(stages_s: dict[str, float], stage: str, awaited: Awaitable[Value]) -> Value:
    """Await a stage, and record its duration, also if it fails."""
    began_s = time.perf_counter()
    try:
        return await awaited
    finally:
        stages_s[stage] = time.perf_counter() - began_s


def _left_s(request: GatewayRequest, timeout_s: float) -> float:
    if (left_s := timeout_s - request.elapsed_s()) > 0:
        return left_s
    raise Failure("deadline_exceeded", f"no response within {timeout_s:.3g} s")


def read_options(request: GatewayRequest, given: dict[str, str]) -> Options:
    """Return the options of a classification from parameters and headers.

    Raises:
        Failure: a value is invalid, or parameter and header disagree.
    """
    top_k = whole_number("top_k", given.get("top_k", "5"), MAX_TOP_K)
    options: Options = {"request_id": request.request_id, "top_k": top_k}
    for name, header in HEADERS.items():
        in_query, in_head = given.get(name, ""), request.header(header)
        if in_query and in_head and in_query != in_head:
            raise invalid_request(f"{name} is {in_query!r}, but {header.decode()} is {in_head!r}")
        if value := in_query or in_head:
            if not is_word(value):
                raise invalid_request(f"{name} must be printable ASCII of at most 128 characters")
            options[name] = value  # type: ignore[literal-required]
    forwarded = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in request.headers.items()
        if name.startswith(ROUTE_PREFIX) and name != HEADERS["route_key"]
    }
    if len(forwarded) > MAX_RULE_HEADERS:
        raise invalid_request(
            f"at most {MAX_RULE_HEADERS} headers {ROUTE_HEADER_PREFIX}…, got {len(forwarded)}"
        )
    for name, value in forwarded.items():
        if not (_RULE_HEADER.fullmatch(name) and is_word(value)):
            raise invalid_request(f"{name[:64]!r} is not a valid rule header, or its value is not ASCII")
    if request.continues_trace:
        forwarded["traceparent"] = request.traceparent
    if forwarded:
        options["headers"] = forwarded
    return options


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


def timings_ms(request: GatewayRequest, received_s: float, stages_s: dict[str, float]) -> TimingsMs:
    """Return the durations of the stages so far."""
    durations_s = received_s, stages_s["admission"], stages_s["inference"], request.elapsed_s()
    return TimingsMs(*(round(seconds * 1e3, 3) for seconds in durations_s))


@asynccontextmanager
async def cancelled_on_disconnect(request: GatewayRequest) -> AsyncIterator[None]:
    """Cancel the current task if the client disconnects.

    Raises:
        ClientClosed: the client has disconnected.
    """
    task = asyncio.current_task()
    assert task
    watching = asyncio.create_task(_cancel_on_disconnect(request, task))
    try:
        yield
    finally:
        if watching.done():
            task.uncancel()
            raise ClientClosed from None
        watching.cancel()


async def _cancel_on_disconnect(request: GatewayRequest, task: "asyncio.Task[object]") -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    task.cancel()

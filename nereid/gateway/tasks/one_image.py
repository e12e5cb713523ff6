"""One image from a request body to the result of a model, for every task."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from nereid.client.classifier_errors import ClassifierError, Overloaded
from nereid.client.request import Options
from nereid.contract import OPTION_HEADERS, ROUTE_HEADER_PREFIX
from nereid.gateway import image_size as images
from nereid.gateway.answers import TimingsMs
from nereid.gateway.failures import Failure, from_classifier, invalid_request
from nereid.gateway.http.http_request import ROUTE_PREFIX, GatewayRequest
from nereid.gateway.http.tracing import is_word
from nereid.gateway.http.upload import ClientClosed
from nereid.gateway.state import CLIENT_CLOSED, Gateway
from nereid.gateway.tasks.gateway_task import GatewayTask
from nereid.tracing.context import TraceContext

Value = TypeVar("Value")
PARAMETERS = ("variant", "version", "route_key")
HEADERS = {name: header.encode() for name, header in OPTION_HEADERS.items()}
# gRPC rejects other names, and decodes values of `-bin` names as base64.
_RULE_HEADER = re.compile(rf"{ROUTE_HEADER_PREFIX}[a-z0-9-]{{1,56}}(?<!-bin)")
# Triton's gRPC takes 8 KiB of metadata.
MAX_RULE_HEADERS = 16


async def answer_one(
    gateway: Gateway, request: GatewayRequest, task: GatewayTask, options: Options
) -> tuple[Any, TimingsMs]:
    """Read the image of a request, and run the request's model; return the result and the timings.

    Raises:
        Failure: the body is invalid, or the image was not admitted, or the model failed.
        ClientClosed: the client has disconnected.
    """
    settings = gateway.settings
    timeout_s = request.timeout_s(settings.default_timeout_s, settings.max_timeout_s)
    gateway.admission.check(timeout_s - request.elapsed_s(), request.owner)
    image = await gateway.uploads.one(request, timeout_s - request.elapsed_s())
    received_s = request.end_stage("receive")
    work = images.work(image, settings.max_pixels)
    gateway.quotas.take(request.key, work - 1, is_debt=True)
    is_large = work >= images.LARGE_WORK
    async with cancelled_on_disconnect(request):
        result, stages_s = await infer(gateway, request, task, image, is_large, options, timeout_s)
    request.variant = gateway.metrics.variant(result.variant)
    return result, timings_ms(request, received_s, stages_s)


async def infer(
    gateway: Gateway,
    request: GatewayRequest,
    task: GatewayTask,
    image: bytes,
    is_large: bool,
    options: Options,
    timeout_s: float,
) -> tuple[Any, dict[str, float]]:
    """Run a model on one image within the admission limit; return the result and the seconds of each stage.

    Raises:
        Failure: the image is too large, was not admitted, or the model failed.
    """
    stages_s = {"admission": 0.0}
    outcome, variant = "inference_failed", ""
    try:
        result = await _admitted(gateway, request, task, image, is_large, options, timeout_s, stages_s)
        outcome, variant = "ok", gateway.metrics.variant(result.variant)
    except Failure as failure:
        outcome = failure.code
        raise
    except asyncio.CancelledError:
        outcome = CLIENT_CLOSED
        raise
    finally:
        request.images += 1
        gateway.count_image(request.endpoint, request.model, variant, outcome, stages_s)
    return result, stages_s


async def _admitted(
    gateway: Gateway,
    request: GatewayRequest,
    task: GatewayTask,
    image: bytes,
    is_large: bool,
    options: Options,
    timeout_s: float,
    stages_s: dict[str, float],
) -> Any:
    settings, admission = gateway.settings, gateway.admission
    if not image:
        raise Failure("invalid_image", "the image is empty")
    images.check(image, settings.max_pixels, settings.max_side_px)
    span = request.spans.context.child()
    waiting = admission.take(_left_s(request, timeout_s), request.owner, is_large)
    slot = await _timed(request, stages_s, "admission", waiting, of=span.span_id)
    try:
        sent: Options = {**options, "timeout_s": _left_s(request, timeout_s)}
        if request.spans.is_forwarded:
            sent["headers"] = {**options.get("headers", {}), "traceparent": str(span)}
        inferring = request.model.upstream(task.kind).infer(image, **sent)
        result = await _timed(request, stages_s, "inference", inferring, span)
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
    return result


async def _timed(
    request: GatewayRequest,
    stages_s: dict[str, float],
    stage: str,
    awaited: Awaitable[Value],
    span: TraceContext | None = None,
    of: str = "",
) -> Value:
    """Await a stage, and record its duration, also if it fails."""
    began_s = time.perf_counter()
    try:
        return await awaited
    finally:
        stages_s[stage] = time.perf_counter() - began_s
        request.spans.add(stage, stages_s[stage], span, of)


def _left_s(request: GatewayRequest, timeout_s: float) -> float:
    if (left_s := timeout_s - request.elapsed_s()) > 0:
        return left_s
    raise Failure("deadline_exceeded", f"no response within {timeout_s:.3g} s")


def read_options(request: GatewayRequest, given: dict[str, str]) -> Options:
    """Return the options of an inference from parameters and headers.

    Raises:
        Failure: a value is invalid, or parameter and header disagree.
    """
    options: Options = {"request_id": request.request_id}
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
    if forwarded:
        options["headers"] = forwarded
    return options


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

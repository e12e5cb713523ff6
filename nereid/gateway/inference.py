"""The single path of an inference to Triton, for every protocol: admit it, send it, account for it."""

import asyncio
import http.client
import json
import re
import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from nereid.base.contract import IMAGE, SCORES
from nereid.base.http_connection import HttpConnectionPool, HttpResponse
from nereid.client.client_errors import RequestRefused, Unreachable, connection_hint
from nereid.client.result_kind import MALFORMED_ERRORS, HttpResult, ResultKind, Timings
from nereid.client.retry import RetryBudget, next_pause_s
from nereid.gateway.failures import (
    CLIENT_CLOSED,
    UNAVAILABLE_RETRY_S,
    Code,
    Failure,
    from_triton,
    malformed_response,
    unreachable,
)
from nereid.gateway.http.upload import check_size
from nereid.gateway.v2.inference_body import (
    BINARY_SIZE,
    BYTES,
    CLASSIFICATION,
    LENGTH_BYTES,
    CheckedBody,
    InferenceRequest,
    Input,
    Output,
    Value,
    check_classification,
)
from nereid.vision.imaging.formats.image_header import ImageHeader

if TYPE_CHECKING:
    from nereid.gateway.admission import Slot
    from nereid.gateway.http.http_request import GatewayRequest
    from nereid.gateway.models import OfferedModel
    from nereid.gateway.settings import GatewaySettings
    from nereid.gateway.state import Gateway

Headers = Sequence[tuple[bytes, bytes]]
JSON_LENGTH_HEADER = b"inference-header-content-length"
BINARY_PARAMETERS: dict[str, Any] = {"binary_data": True}
OCTET_STREAM_HEADER = (b"content-type", b"application/octet-stream")
_JSON_HEADER = (b"content-type", b"application/json")
NAME_PATTERN, VERSION_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}"), re.compile(r"[0-9]{1,19}")


class TensorInference:
    """An inference on checked tensors, whose response is passed through.

    Args:
        path: Triton's path for the model.
        headers: headers for a route.
        checked: the request for Triton.

    Attributes:
        budget: retry budget; None for no retries, because a sequence must not see a request twice.
        path: Triton's path for the inference.
        costs: cost of each image or tensor, in units of a small photo.
        debt: cost not yet charged to the key's quota.
        stages_s: durations of the stages so far.
    """

    budget: RetryBudget | None = None

    def __init__(self, path: str, headers: Headers, checked: CheckedBody) -> None:
        self.path, self._headers, self._checked = path, headers, checked
        self.costs, self.debt = checked.costs, sum(checked.costs) - 1
        self.stages_s: dict[str, float] = {}

    def encode(self, remaining_s: float) -> tuple[list[tuple[bytes, bytes]], Sequence[bytes | memoryview]]:
        """Return headers and body of the request to Triton."""
        content = [_JSON_HEADER]
        if self._checked.json_bytes is not None:
            content = [OCTET_STREAM_HEADER, (JSON_LENGTH_HEADER, b"%d" % self._checked.json_bytes)]
        return [*content, *self._headers], self._checked.parts

    def read(self, response: HttpResponse) -> HttpResponse:
        """Return the response.

        Raises:
            Failure: it is an error.
        """
        if response.status != HTTPStatus.OK:
            raise from_triton(response)
        return response


def checked_path(name: str, version: str) -> str:
    """Return Triton's path for a model or a version of it.

    Raises:
        Failure: `not_found`, because no model can have that name or version.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise Failure("not_found", f"unknown model {name[:128]!r}")
    if version and not VERSION_PATTERN.fullmatch(version):
        raise Failure("not_found", f"model '{name}': expected a version such as 1, got {version[:128]!r}")
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "")


async def run_tensors(
    gateway: "Gateway", request: "GatewayRequest", path: str, headers: Headers, checked: CheckedBody
) -> HttpResponse:
    """Send an inference to Triton's path of a model, and return the response; `headers` are for the route.

    Raises:
        Failure: the request was not admitted, failed, or got no response in time.
    """
    if checked.classified:
        described = await get_from_triton(gateway, path, request.remaining_s())
        if described.status != HTTPStatus.OK:
            raise from_triton(described)
        check_classification(json.loads(described.body), checked.classified)
    response: HttpResponse = await run_inference(
        gateway, request, TensorInference(f"{path}/infer", headers, checked)
    )
    return response


async def get_from_triton(gateway: "Gateway", path: str, timeout_s: float = inf) -> HttpResponse:
    """Return Triton's response to a GET request, waiting at most the default request timeout.

    Raises:
        Failure: there was no response.
    """
    try:
        timeout_s = min(timeout_s, gateway.settings.default_timeout_s)
        return await send_to_triton(gateway.models.triton, "GET", path, timeout_s=timeout_s)
    except TimeoutError:
        raise Failure("deadline_exceeded", "the server does not respond") from None


# Placeholder for client timings; the gateway measures its own.
_NO_TIMINGS = Timings(0.0, 0.0)
# Messages that REST API callers see instead of Triton's own.
_MESSAGES: dict[Code, str] = {
    "overloaded": "too many images are in flight; retry later",
    "unavailable": "the requested model is not served",
}


class ImageInference:
    """An inference on one image, whose response is read as the result of a task.

    Args:
        kind: the task's kind of results.
        image_header: size and format of the image, as declared by its structure.
        cost: cost of the image in units of a small photo.
        headers: headers for a route.
        top_k: number of classes, for a classification.
        debt: cost not yet charged to the key's quota.
        convert: returns the fields of an answer, given a result; may raise Failure.

    Attributes: the same as for `TensorInference`, and:
        is_prepared: whether the outputs to request are known.
        values: the fields of the answer.
        variant: label of the variant that answered, for metrics.
    """

    def __init__(
        self,
        offered_model: "OfferedModel",
        kind: ResultKind[Any],
        image: bytes | memoryview,
        image_header: ImageHeader | None,
        cost: int,
        headers: Headers,
        request_id: str,
        top_k: int = 1,
        debt: int = 0,
        convert: Callable[[Any], tuple[Any, ...]] | None = None,
    ) -> None:
        self._convert, self.values = convert, tuple[Any, ...]()
        self.offered_model, self.budget, self._kind = offered_model, offered_model.budget, kind
        self._image, self._image_header = image, image_header
        self._headers, self._id, self.variant = headers, request_id, ""
        self._wanted, self.path = (kind.action, top_k), f"{offered_model.path}/infer"
        self.costs, self.debt = [cost], debt
        # A copy, because the model may be replaced, and its outputs forgotten, while this request waits.
        self._outputs = offered_model.outputs.get(self._wanted, [])
        self.is_prepared = self._wanted in offered_model.outputs
        self.stages_s = {"admission": 0.0}

    def check(self, settings: "GatewaySettings") -> None:
        """Reject an image that is empty or whose header declares too large a size.

        Raises:
            Failure: `invalid_image`.
        """
        if not self._image:
            raise Failure("invalid_image", "the image is empty")
        check_size(self._image_header, settings)

    async def prepare(self, triton: HttpConnectionPool, remaining_s: float) -> None:
        """Determine once which of the model's outputs to request.

        Raises:
            Failure: the model cannot be reached or has a different task.
        """
        response = await send_to_triton(triton, "GET", self.offered_model.path, timeout_s=remaining_s)
        if response.status != HTTPStatus.OK:
            raise self._rejected(response)
        try:
            names = self._kind.needed_outputs(json.loads(response.body))
        except RequestRefused as error:
            raise self._not_served() from error
        except (Unreachable, *MALFORMED_ERRORS) as error:
            raise unreachable("") from error
        classes = {**BINARY_PARAMETERS, CLASSIFICATION: self._wanted[1]}
        outputs = [Output(name, classes if name == SCORES else BINARY_PARAMETERS) for name in names]
        self._outputs = self.offered_model.outputs[self._wanted] = outputs
        self.is_prepared = True

    def encode(self, remaining_s: float) -> tuple[list[tuple[bytes, bytes]], Sequence[bytes | memoryview]]:
        """Return headers and body of the request to Triton."""
        size = len(self._image)
        inputs = [Input(IMAGE, [1, 1], BYTES, {BINARY_SIZE: size + LENGTH_BYTES})]
        options: dict[str, Value] = {"timeout": max(1, int(remaining_s * 1e6))}
        head = msgspec.json.encode(InferenceRequest(inputs, self._id, self._outputs, options))
        headers = [OCTET_STREAM_HEADER, (JSON_LENGTH_HEADER, b"%d" % len(head)), *self._headers]
        return headers, [head, size.to_bytes(LENGTH_BYTES, "little"), self._image]

    def read(self, response: HttpResponse) -> Any:
        """Return the result.

        Raises:
            Failure: the response is an error, is malformed, or is not Triton's response to this request.
        """
        if response.status != HTTPStatus.OK:
            raise self._rejected(response)
        size, kind = response.headers.get(JSON_LENGTH_HEADER), self._kind
        try:
            result = HttpResult(response.body, None if size is None else int(size))
        except MALFORMED_ERRORS as error:
            raise unreachable("") from error
        if result.get_response().get("id", self._id) != self._id:
            raise unreachable("")
        if not kind.is_complete(result, 1):
            raise malformed_response("an output is missing or has a wrong shape")
        try:
            answer = kind.read(result, self.offered_model.name, self._id, _NO_TIMINGS)[0]
        except Unreachable as error:
            raise malformed_response("an output has a wrong value") from error
        if self._convert:
            self.values = self._convert(answer)
        return answer

    def _rejected(self, response: HttpResponse) -> Failure:
        """Return the error response for an image; the gateway wrote the request, so it cannot be invalid."""
        failure = from_triton(response)
        if failure.is_inferred_from_status and failure.code in ("invalid_request", "not_found"):
            return self._not_served()
        failure.message = _MESSAGES.get(failure.code, failure.message)
        return failure

    def _not_served(self) -> Failure:
        self.offered_model.forget()
        failure = Failure("unavailable", _MESSAGES["unavailable"], UNAVAILABLE_RETRY_S)
        failure.is_retryable = False
        return failure


async def run_inference(
    gateway: "Gateway", request: "GatewayRequest", inference: "TensorInference | ImageInference"
) -> Any:
    """Run an inference within its time limit and the limits of its key and the server; return its result.

    Raises:
        Failure: the inference was not admitted, failed, or got no response in time.
    """
    outcome, variant = "inference_failed", ""
    try:
        if isinstance(inference, ImageInference):
            inference.check(gateway.settings)
        if inference.debt:
            gateway.quotas.take(request.key, inference.debt, is_debt=True)
        result = await _admit_and_send(gateway, request, inference)
        outcome, variant = "ok", getattr(result, "variant", "")
    except Failure as failure:
        outcome = failure.code
        raise
    except asyncio.CancelledError:
        outcome = CLIENT_CLOSED
        raise
    finally:
        stages_s = inference.stages_s
        if isinstance(inference, ImageInference):
            model, endpoint = inference.offered_model, request.endpoint
            request.images += 1
            inference.variant = variant = gateway.metrics.variant_label(variant)
            gateway.metrics.count("images", endpoint, model.name, variant, outcome, stages_s)
            model.recent_load.record(outcome, variant, sum(stages_s.values()))
        else:
            request.stages_s |= stages_s
    return result


async def _admit_and_send(
    gateway: "Gateway", request: "GatewayRequest", inference: "TensorInference | ImageInference"
) -> Any:
    admission, spans = gateway.admission, request.spans
    # Without tracing, nobody reads the span of an inference.
    span = spans.context.child() if spans.is_forwarded else spans.context
    remaining_s, started_at = request.remaining_s(), time.perf_counter()
    try:
        slot = await admission.acquire(remaining_s, request.key_id, inference.costs, inference.path)
    finally:
        inference.stages_s["admission"] = time.perf_counter() - started_at
        if spans.is_traced:
            spans.add("admission", inference.stages_s["admission"], of=span.span_id)
    started_at = time.perf_counter()
    trace = [(b"traceparent", str(span).encode())] if spans.is_forwarded else []
    result = None
    try:
        result = await send_inference(gateway.models.triton, inference, request.remaining_s, trace)
    except (TimeoutError, asyncio.CancelledError) as error:
        _release_later(slot)
        if isinstance(error, TimeoutError):
            raise request.deadline_failure() from None
        raise
    except BaseException as error:
        if isinstance(error, Failure) and error.is_from_triton and error.code == "deadline_exceeded":
            _release_later(slot)  # a route answers before its variant has
            raise
        if isinstance(error, Failure) and error.code == "overloaded":
            slot.release_rejected()
            error.retry_after_s = admission.retry_after_s()
        slot.release()
        raise
    finally:
        gateway.quotas.take(request.key, slot.measure(result is not None), is_debt=True)
        inference.stages_s["inference"] = time.perf_counter() - started_at
        if spans.is_traced:
            spans.add("inference", inference.stages_s["inference"], span)
    slot.release_answered()
    return result


def _release_later(slot: "Slot") -> None:
    """Release the slot of a late request once the server has probably finished it."""
    asyncio.get_running_loop().call_later(slot.abandoned_work_s(), slot.release)


async def send_inference(
    triton: HttpConnectionPool,
    inference: "TensorInference | ImageInference",
    get_remaining_s: Callable[[], float],
    more_headers: Headers = (),
) -> Any:
    """Send an inference, retrying after faults that are safe to retry, and return its result.

    Args:
        inference: its own headers precede `more_headers`.
        get_remaining_s: returns the seconds left, or raises an error.

    Raises:
        Failure: the inference failed.
        TimeoutError: there was no response in time.
    """
    budget, attempt, remaining_s = inference.budget, 1, get_remaining_s()
    if budget:
        budget.running += 1
    try:
        while True:
            try:
                if isinstance(inference, ImageInference) and not inference.is_prepared:
                    await inference.prepare(triton, remaining_s)
                    remaining_s = get_remaining_s()
                headers, parts = inference.encode(remaining_s)
                response = await send_to_triton(
                    triton, "POST", inference.path, [*headers, *more_headers], parts, remaining_s
                )
                result = inference.read(response)
            except Failure as failure:
                pause_s = next_pause_s(budget, attempt, failure.is_retryable)
                if pause_s is None or pause_s >= get_remaining_s():
                    raise
                attempt += 1
                await asyncio.sleep(pause_s)
                remaining_s = get_remaining_s()
            else:
                if budget and budget.spent_tokens:
                    budget.record_success()
                return result
    finally:
        if budget:
            budget.running -= 1


async def send_to_triton(
    triton: HttpConnectionPool,
    method: str,
    path: str,
    headers: Headers = (),
    body: Sequence[bytes | memoryview] = (),
    timeout_s: float | None = None,
) -> HttpResponse:
    """Send a request to Triton and return the response.

    Raises:
        Failure: `unreachable`, because there was no response.
        TimeoutError: there was no response in time.
    """
    try:
        return await triton.request(method, path, headers, body, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        # A network that loses packets also raises TimeoutError, but with an errno.
        if isinstance(error, TimeoutError) and not error.errno:
            raise
        raise unreachable(connection_hint(str(error))) from error

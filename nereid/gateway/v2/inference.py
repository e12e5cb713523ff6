"""Common parts of HTTP and gRPC: limits of an inference, and which of Triton's messages callers may read."""

import asyncio
import json
import re
from collections.abc import Sequence
from http import HTTPStatus

from nereid import contract
from nereid.gateway.failures import PREFIXES, Code, Failure, invalid_request
from nereid.gateway.http.http_request import JSON, GatewayRequest
from nereid.gateway.http.tracing import is_word
from nereid.gateway.image_size import LARGE_WORK
from nereid.gateway.state import Gateway
from nereid.gateway.v2 import tensor_checks as tensors
from nereid.gateway.v2.inference_body import CheckedBody
from nereid.http_connection import HttpResponse

LENGTH = b"inference-header-content-length"
NAME, VERSION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}"), re.compile(r"[0-9]{1,19}")
# The only headers of callers that Triton receives; a route reads them.
_FORWARDED = (contract.VARIANT_HEADER.encode(), contract.VERSION_HEADER.encode())
_FORWARDED_PREFIX = contract.ROUTE_HEADER_PREFIX.encode()
MAX_FORWARDED = 32
# Names of shared memory regions help to attack a server (CVE-2025-23320); paths tell about the machine.
_INTERNAL = re.compile(r"shm|shared memory|nereid-[0-9a-f]{8}|(?:^|[\s'\"(=])/\w[\w.-]*/")
_HIDDEN = "the logs of server and gateway have the reason"
_BLAMED: dict[int, Code] = {400: "invalid_request", 404: "not_found"}
_TEXTS: tuple[tuple[str, Code], ...] = (
    *((prefix, code) for code, prefix in PREFIXES.items() if code not in ("inference_failed", "unreachable")),
    (contract.QUEUE_FULL_TEXT, "overloaded"),
    (contract.QUEUE_TIMEOUT_TEXT, "deadline_exceeded"),
    (contract.NOT_READY_TEXT, "unavailable"),
    # Such as a number that is too large.
    ("failed to parse the request JSON buffer", "invalid_request"),
)


def path_of(name: str, version: str) -> str:
    """Return Triton's path of a model, or of a version.

    Raises:
        Failure: `not_found`, no model can have that name or version.
    """
    if not NAME.fullmatch(name):
        raise Failure("not_found", f"unknown model {name[:128]!r}")
    if version and not VERSION.fullmatch(version):
        raise Failure("not_found", f"model '{name}': expected a version such as 1, got {version[:128]!r}")
    return f"/v2/models/{name}" + (f"/versions/{version}" if version else "")


def forwarded_headers(request: GatewayRequest) -> list[tuple[bytes, bytes]]:
    """Return the headers that a route reads.

    Raises:
        Failure: there are too many, or a value is not printable ASCII.
    """
    found = [
        (name, value)
        for name, value in request.headers.items()
        if name in _FORWARDED or name.startswith(_FORWARDED_PREFIX)
    ]
    if len(found) > MAX_FORWARDED:
        raise invalid_request(f"expected at most {MAX_FORWARDED} headers for routes, got {len(found)}")
    for name, value in found:
        if not is_word(value.decode("latin-1")) or not is_word(name.decode("latin-1"), 64):
            raise invalid_request(f"header {name[:64].decode('latin-1')!r} must be printable ASCII")
    return found


async def run(
    gateway: Gateway,
    request: GatewayRequest,
    path: str,
    headers: Sequence[tuple[bytes, bytes]],
    checked: CheckedBody,
    timeout_s: float,
) -> HttpResponse:
    """Send an inference within the limits of its key and of the server; return Triton's response.

    Args:
        gateway: limits and metrics.
        request: the request of the caller.
        path: Triton's path of the model.
        headers: headers for the route.
        checked: the request for Triton.
        timeout_s: time limit from the arrival of the request.

    Raises:
        Failure: the request was not admitted, or failed, or no response came in time.
    """
    if checked.classified:
        response = await read(gateway, path)
        if response.status != HTTPStatus.OK:
            raise failure_of(response)
        tensors.check_classification(json.loads(response.body), checked.classified)
    work, sent_headers = checked.work, [*headers, *_content_headers(checked)]
    gateway.quotas.take(request.key, sum(work) - 1, is_debt=True)
    late = f"no response within {timeout_s:.3g} s"
    began_s = request.elapsed_s()
    if began_s >= timeout_s:
        raise Failure("deadline_exceeded", late)
    slot = await gateway.admission.take(timeout_s - began_s, request.owner, max(work) >= LARGE_WORK)
    sent_s = request.end_stage("admission", began_s)
    span = request.spans.context.child()
    if request.spans.is_forwarded:
        sent_headers.append((b"traceparent", str(span).encode()))
    try:
        async with asyncio.timeout(timeout_s - sent_s):
            response = await gateway.triton.request("POST", f"{path}/infer", sent_headers, checked.parts)
    except (TimeoutError, asyncio.CancelledError) as error:
        asyncio.get_running_loop().call_later(slot.rest_s(), slot.release)
        if isinstance(error, TimeoutError):
            raise Failure("deadline_exceeded", late) from None
        raise
    except BaseException:
        slot.release()
        raise
    finally:
        request.stages_s["inference"] = request.elapsed_s() - sent_s
        request.spans.add("inference", request.stages_s["inference"], span)
    if response.status != HTTPStatus.OK:
        failure = failure_of(response)
        (slot.rejected if failure.code == "overloaded" else slot.release)()
        raise failure
    (slot.answered if work == [1] else slot.release)()
    return response


def _content_headers(checked: CheckedBody) -> list[tuple[bytes, bytes]]:
    if checked.json_bytes is None:
        return [(b"content-type", JSON)]
    return [(b"content-type", b"application/octet-stream"), (LENGTH, b"%d" % checked.json_bytes)]


async def read(gateway: Gateway, path: str) -> HttpResponse:
    """Return Triton's response to GET.

    Raises:
        Failure: no response came.
    """
    try:
        async with asyncio.timeout(gateway.settings.default_timeout_s):
            return await gateway.triton.request("GET", path)
    except TimeoutError:
        raise Failure("deadline_exceeded", "the server does not respond") from None


def failure_of(response: HttpResponse) -> Failure:
    """Return the error response for an error of Triton; callers do not read what helps an attacker."""
    try:
        text = str(json.loads(response.body)["error"])
    except (ValueError, LookupError, TypeError):
        text = ""
    if contract.SHARED_MEMORY_FULL_TEXT in text:
        return Failure("overloaded", contract.SHARED_MEMORY_FULL)
    is_internal = _INTERNAL.search(text) is not None
    for words, code in _TEXTS:
        if words in text:
            return Failure(code, _HIDDEN if is_internal else text.partition(words)[2] or text)
    if code_of_status := _BLAMED.get(response.status):
        return Failure(code_of_status, f"the server rejected the request; {_HIDDEN}" if is_internal else text)
    return Failure("inference_failed", f"the server failed; {_HIDDEN}")

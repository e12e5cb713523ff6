"""Common parts of the v2 protocol over HTTP and gRPC: names of models, and the way to Triton."""

import json
import re
from collections.abc import Sequence
from http import HTTPStatus

from nereid.gateway.failures import Failure, from_triton
from nereid.gateway.http.http_request import GatewayRequest
from nereid.gateway.inference import LENGTH as LENGTH
from nereid.gateway.inference import TensorCall
from nereid.gateway.inference import request as request_triton
from nereid.gateway.inference import run as run_inference
from nereid.gateway.state import Gateway
from nereid.gateway.v2 import tensor_checks as tensors
from nereid.gateway.v2.inference_body import CheckedBody
from nereid.http_connection import HttpResponse

NAME, VERSION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}"), re.compile(r"[0-9]{1,19}")


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
    """Return the headers that a route reads; see `GatewayRequest.forwarded`."""
    return request.forwarded()


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
    request.limit_s = timeout_s
    if checked.classified:
        described = await read(gateway, path)
        if described.status != HTTPStatus.OK:
            raise failure_of(described)
        tensors.check_classification(json.loads(described.body), checked.classified)
    response: HttpResponse = await run_inference(
        gateway, request, TensorCall(f"{path}/infer", headers, checked)
    )
    return response


async def read(gateway: Gateway, path: str) -> HttpResponse:
    """Return Triton's response to GET.

    Raises:
        Failure: no response came.
    """
    try:
        return await request_triton(gateway.triton, "GET", path, timeout_s=gateway.settings.default_timeout_s)
    except TimeoutError:
        raise Failure("deadline_exceeded", "the server does not respond") from None


def failure_of(response: HttpResponse) -> Failure:
    """Return the error response for an error of Triton."""
    return from_triton(response.status, response.body)

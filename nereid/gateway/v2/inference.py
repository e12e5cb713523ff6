"""Common parts of the v2 protocol over HTTP and gRPC: names of models, and the way to Triton."""

import json
import re
from collections.abc import Sequence
from http import HTTPStatus

from nereid.base.http_connection import HttpConnections, HttpResponse
from nereid.client.retry import Budget
from nereid.gateway.failures import Failure, from_triton
from nereid.gateway.http.http_request import GatewayRequest
from nereid.gateway.inference import LENGTH as LENGTH
from nereid.gateway.inference import OCTETS, Headers
from nereid.gateway.inference import request as request_triton
from nereid.gateway.inference import run as run_inference
from nereid.gateway.models import OfferedModel
from nereid.gateway.settings import Settings
from nereid.gateway.state import Gateway
from nereid.gateway.v2 import tensor_checks as tensors
from nereid.gateway.v2.inference_body import CheckedBody

_JSON = (b"content-type", b"application/json")
NAME, VERSION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,255}"), re.compile(r"[0-9]{1,19}")


class TensorCall:
    """An inference of checked tensors, whose response is passed on.

    Args:
        path: Triton's path of the model.
        headers: headers for a route.
        checked: the request for Triton.

    Attributes:
        offered: the model of the gateway; None for tensors.
        budget: that of retries; None for no retries, because a sequence must not see a request twice.
        path: Triton's path of the inference.
        work: cost of each image or tensor, in units of a small photo.
        debt: cost that the quota of the key does not have yet.
        is_prepared: whether the outputs to request are known.
        stages_s: durations of the stages so far.
        variant: label of the variant that answered, for metrics.
    """

    offered: OfferedModel | None = None
    budget: Budget | None = None
    is_prepared = True
    variant = ""

    def __init__(self, path: str, headers: Headers, checked: CheckedBody) -> None:
        self.path, self._headers, self._checked = path, headers, checked
        self.work, self.debt = checked.work, sum(checked.work) - 1
        self.stages_s: dict[str, float] = {}

    def check(self, settings: Settings) -> None:
        """Do nothing; the tensors were checked when they were read."""

    async def prepare(self, triton: HttpConnections, left_s: float) -> None:
        """Do nothing."""

    def encode(self, left_s: float) -> tuple[str, list[tuple[bytes, bytes]], Sequence[bytes | memoryview]]:
        """Return path, headers and body of the request to Triton."""
        json_bytes = self._checked.json_bytes
        content = [_JSON] if json_bytes is None else [OCTETS, (LENGTH, b"%d" % json_bytes)]
        return self.path, [*content, *self._headers], self._checked.parts

    def read(self, response: HttpResponse) -> HttpResponse:
        """Return the response.

        Raises:
            Failure: it is an error.
        """
        if response.status != HTTPStatus.OK:
            raise from_triton(response.status, response.body)
        return response


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


async def run(
    gateway: Gateway,
    request: GatewayRequest,
    path: str,
    headers: Sequence[tuple[bytes, bytes]],
    checked: CheckedBody,
) -> HttpResponse:
    """Send an inference within the limits of its key and of the server; return Triton's response.

    Args:
        gateway: limits and metrics.
        request: the request of the caller.
        path: Triton's path of the model.
        headers: headers for the route.
        checked: the request for Triton.

    Raises:
        Failure: the request was not admitted, or failed, or no response came in time.
    """
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

"""Middleware for every request: ids, security headers, metrics and the log."""

import asyncio
import json
import logging
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid.gateway.failures import CLIENT_CLOSED, STATUS, Failure
from nereid.gateway.failures import FAULTS as FAULTS
from nereid.gateway.failures import GATEWAY_FAILED as GATEWAY_FAILED
from nereid.gateway.gateway_metrics import OTHER
from nereid.gateway.http.http_request import GatewayRequest, failure_response
from nereid.gateway.http.origin_guard import OriginGuard, head_of
from nereid.gateway.http.upload import ClientClosed
from nereid.gateway.state import Gateway

log = logging.getLogger("nereid.gateway")
# One line of JSON for each request.
access_log = logging.getLogger("nereid.gateway.access")
CLIENT_CLOSED_STATUS = 499
IMAGE_ENDPOINTS = ("/predict", "/v1/classify", "/v1/read", "/v1/waybill", "/v1/detect")
# The first of several codes with a status stands for it.
_CODES = {status: code for code, status in reversed(STATUS.items())}


class RequestMiddleware:
    """Wrap the whole application; pure ASGI."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app, self._gateway = app, gateway
        self._origin_guard = OriginGuard(gateway.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one HTTP request, and record its outcome."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = scope["nereid.request"] = GatewayRequest(scope, receive, self._gateway.tracer)
        own = [
            *head_of(scope["path"]),
            (b"x-request-id", request.request_id.encode()),
            (b"traceparent", str(request.spans.context).encode()),
        ]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        try:
            request.reject_repeats()
            own += self._origin_guard.check(request)
            reply = self._origin_guard.preflight(request)
            await (reply or self._app)(scope, receive, send_with_headers)
        except Failure as failure:
            request.outcome = failure.code
            if failure.code in FAULTS:
                log.warning("request %s: %s: %r", request.request_id, failure.code, failure.__cause__)
            await failure_response(failure, request)(scope, receive, send_with_headers)
        except ClientClosed:
            request.outcome, request.status = CLIENT_CLOSED, CLIENT_CLOSED_STATUS
        except Exception:
            log.exception("request %s failed", request.request_id)
            if request.status:
                raise
            request.outcome = "inference_failed"
            fault = Failure("inference_failed", GATEWAY_FAILED)
            await failure_response(fault, request)(scope, receive, send_with_headers)
        finally:
            # After the response: uvloop writes it at the end of this turn of the loop.
            asyncio.get_running_loop().call_soon(record, self._gateway, request)
            # Breaks a reference cycle, which would wait for Python's garbage collector.
            del scope["nereid.request"]


def record(gateway: Gateway, request: GatewayRequest) -> None:
    """Record the outcome of a request, and release what it held."""
    outcome = request.outcome or _CODES.get(request.status, "ok")
    endpoint, metrics = request.endpoint or OTHER, gateway.metrics
    total_s = request.elapsed_s()
    gateway.uploads.buffers.give_back(request.key, request.body_bytes)
    labels = endpoint, request.model_label, request.variant
    metrics.count_request(*labels, outcome)
    metrics.observe(*labels, "total", outcome, total_s)
    for stage, seconds in request.stages_s.items():
        metrics.observe(*labels, stage, outcome, seconds)
    if endpoint in IMAGE_ENDPOINTS and not request.images:
        (request.offered or gateway.models.default).live.note(outcome, "", 0.0)
    is_fault = outcome in FAULTS or outcome == "deadline_exceeded"
    about = {"endpoint": endpoint, "model": request.model_label, "variant": request.variant}
    if request.is_inference:
        request.spans.end(request.request_id, outcome, is_fault, **about)
    if access_log.isEnabledFor(logging.INFO):
        access_log.info("%s", _log_line(request, outcome, total_s))


def _log_line(request: GatewayRequest, outcome: str, total_s: float) -> str:
    return json.dumps(
        {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "method": request.scope["method"],
            "path": request.scope["path"],
            "status": request.status,
            "outcome": outcome,
            "ms": round(total_s * 1e3, 1),
            "request_id": request.request_id,
            "trace_id": request.spans.context.trace_id,
            "model": request.model_label,
            "variant": request.variant,
            "bytes": request.body_bytes,
            "stages_ms": {stage: round(seconds * 1e3, 3) for stage, seconds in request.stages_s.items()},
            "key_id": request.key.id if request.key else None,
        }
    )

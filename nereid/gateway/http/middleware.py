"""What happens to every request, whoever answers it: ids, security headers, counts, the log."""

import json
import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nereid.gateway.failures import STATUS, Failure
from nereid.gateway.gateway_metrics import OTHER
from nereid.gateway.http.http_request import Exchange, failure_reply
from nereid.gateway.http.origin_guard import Door, head_of
from nereid.gateway.http.upload import ClientClosed
from nereid.gateway.state import CLIENT_CLOSED, Gateway

log = logging.getLogger("nereid.gateway")
CLIENT_CLOSED_STATUS = 499
# What somebody has to look after; the rest is the caller's, or load.
FAULTS = frozenset({"inference_failed", "unavailable", "unreachable"})
IMAGE_ENDPOINTS = ("/predict", "/v1/classify")
# The first of several codes with a status stands for it.
_CODES = {status: code for code, status in reversed(STATUS.items())}


class Frame:
    """Wraps the whole application; pure ASGI."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app, self._gateway = app, gateway
        self._door = Door(gateway.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = scope["exchange"] = Exchange(scope, receive)
        own = [
            *head_of(scope["path"]),
            (b"x-request-id", exchange.request_id.encode()),
            (b"traceparent", exchange.traceparent.encode()),
        ]

        async def send_framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                message["headers"] = [*message["headers"], *own]
            await send(message)

        try:
            exchange.refuse_repeats()
            own += self._door.check(exchange)
            reply = self._door.preflight(exchange)
            await (reply or self._app)(scope, receive, send_framed)
        except Failure as failure:
            exchange.outcome = failure.code
            if failure.code in FAULTS:
                log.warning("request %s: %s: %r", exchange.request_id, failure.code, failure.__cause__)
            await failure_reply(failure, exchange.request_id)(scope, receive, send_framed)
        except ClientClosed:
            exchange.outcome, exchange.status = CLIENT_CLOSED, CLIENT_CLOSED_STATUS
        except Exception:
            log.exception("request %s failed", exchange.request_id)
            if exchange.status:
                raise
            exchange.outcome = "inference_failed"
            fault = Failure("inference_failed", "the gateway failed; its log has the request id")
            await failure_reply(fault, exchange.request_id)(scope, receive, send_framed)
        finally:
            self._finish(exchange)
            # It holds what gives the body, and that holds the scope: all would wait for Python's collector.
            del scope["exchange"]

    def _finish(self, exchange: Exchange) -> None:
        outcome = exchange.outcome or _CODES.get(exchange.status, "ok")
        endpoint, metrics = exchange.endpoint or OTHER, self._gateway.metrics
        total_s = exchange.elapsed_s()
        self._gateway.uploads.buffers.give_back(exchange.key, exchange.body_bytes)
        metrics.count_request(endpoint, exchange.variant, outcome)
        metrics.observe(endpoint, exchange.variant, "total", outcome, total_s)
        for stage, seconds in exchange.stages_s.items():
            metrics.observe(endpoint, exchange.variant, stage, outcome, seconds)
        if endpoint in IMAGE_ENDPOINTS and not exchange.images:
            self._gateway.live.note(outcome, "", 0.0)
        if log.isEnabledFor(logging.INFO):
            log.info("%s", _line(exchange, outcome, total_s))


def _line(exchange: Exchange, outcome: str, total_s: float) -> str:
    return json.dumps(
        {
            "method": exchange.scope["method"],
            "path": exchange.scope["path"],
            "status": exchange.status,
            "outcome": outcome,
            "ms": round(total_s * 1e3, 1),
            "request_id": exchange.request_id,
            "trace_id": exchange.traceparent.split("-")[1],
            "key_id": exchange.key.id if exchange.key else None,
        }
    )

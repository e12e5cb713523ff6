"""The v2 protocol over gRPC: health, metadata and inference."""

import asyncio
import logging
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message
from tritonclient.grpc import service_pb2 as v2

from nereid.errors import OperationFailed
from nereid.gateway.admission.access import Need, identify
from nereid.gateway.failures import Code, Failure, invalid_request
from nereid.gateway.http.http_request import GatewayRequest
from nereid.gateway.http.middleware import FAULTS, GATEWAY_FAILED, record
from nereid.gateway.state import CLIENT_CLOSED, Gateway
from nereid.gateway.v2 import inference
from nereid.gateway.v2.grpc_reads import HEALTH_CHECK, READ, read
from nereid.gateway.v2.message import check_message, to_message
from nereid.units import format_bytes

log = logging.getLogger("nereid.gateway")
SERVICE = "/inference.GRPCInferenceService/"
INFER = "ModelInfer"
OPEN = ("ServerLive", "ServerReady", HEALTH_CHECK)
MAX_READ_BYTES = 4096
# Framing of the tensors of an image of the largest size.
MAX_FRAME_BYTES = 2**20
# Half of a message may stay on its way for this time; the connection then ends after the grace.
MAX_CONNECTION_S, GRACE_S = 600, 60
MAX_STREAMS = 256
_STATUS: dict[Code, grpc.StatusCode] = {
    "invalid_image": grpc.StatusCode.INVALID_ARGUMENT,
    "invalid_request": grpc.StatusCode.INVALID_ARGUMENT,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "forbidden": grpc.StatusCode.PERMISSION_DENIED,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "too_large": grpc.StatusCode.INVALID_ARGUMENT,
    "body_timeout": grpc.StatusCode.DEADLINE_EXCEEDED,
    "rate_limited": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "overloaded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "unreachable": grpc.StatusCode.UNAVAILABLE,
    "deadline_exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
}
# grpc has no types; this is grpc.aio.ServicerContext.
Context: TypeAlias = Any


class GrpcFront(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Checks each call, and passes it to Triton over HTTP.

    The handlers read the messages themselves, so that a key is checked before its message is received.

    Args:
        gateway: settings, keys and limits.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._max_bytes = gateway.settings.max_body_bytes + MAX_FRAME_BYTES

    def service(self, details: Any) -> grpc.RpcMethodHandler | None:
        """Return the handler of a method; None for methods that the gateway does not offer."""
        method: str = details.method
        name = method.removeprefix(SERVICE) if method.startswith(SERVICE) else method
        if name != INFER and name not in READ:
            return None

        async def handle(messages: Any, context: Context) -> bytes:
            return await self._handle(name, context)

        return grpc.stream_unary_rpc_method_handler(handle)

    async def start(self, host: str, port: int, tls: tuple[bytes, bytes] | None) -> int:
        """Listen, and return the port.

        Args:
            host, port: the address; port 0 selects a free port.
            tls: certificate and key as PEM, None for no TLS.

        Raises:
            OperationFailed: the address cannot be used.
        """
        self._server = grpc.aio.server(handlers=[self], options=self._options())
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls:
                credentials = grpc.ssl_server_credentials([(tls[1], tls[0])])
                port = self._server.add_secure_port(address, credentials)
            else:
                port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise OperationFailed(
                f"cannot listen on {host} port {port} for gRPC; fix: choose another with --grpc-port"
            ) from None
        await self._server.start()
        return port

    def _options(self) -> list[tuple[str, int]]:
        return [
            ("grpc.max_receive_message_length", self._max_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", 2**14),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.max_connection_age_ms", MAX_CONNECTION_S * 1000),
            ("grpc.max_connection_age_grace_ms", GRACE_S * 1000),
            # Only uncompressed messages: unpacking has no limit of its own.
            ("grpc.compression_enabled_algorithms_bitset", 1),
            ("grpc.so_reuseport", int(self._gateway.shared is not None)),
        ]

    async def stop(self, grace_s: float) -> None:
        """Let calls in flight finish within a time, and close all connections."""
        await self._server.stop(grace_s)

    async def _handle(self, name: str, context: Context) -> bytes:
        """Handle one call, and record its outcome."""
        gateway = self._gateway
        sent = [(key.encode(), _as_bytes(value)) for key, value in context.invocation_metadata() or ()]
        request = GatewayRequest({"method": "gRPC", "path": name, "headers": sent}, _nothing, gateway.tracer)
        request.endpoint, request.is_inference = name, name == INFER
        try:
            request.reject_repeats()
            need: Need = "open" if name in OPEN else "infer"
            request.key = identify(gateway.keys, gateway.settings.requires_keys, request.headers, need)
            if name == INFER:
                return await self._infer(request, context)
            return await self._read(name, request, context)
        except Failure as failure:
            if failure.code in FAULTS:
                log.warning("request %s: %s: %r", request.request_id, failure.code, failure.__cause__)
            return await _abort(context, request, failure)
        except asyncio.CancelledError:
            request.outcome = CLIENT_CLOSED
            raise
        except Exception:
            log.exception("request %s failed", request.request_id)
            return await _abort(context, request, Failure("inference_failed", GATEWAY_FAILED))
        finally:
            asyncio.get_running_loop().call_soon(record, gateway, request)

    async def _read(self, name: str, request: GatewayRequest, context: Context) -> bytes:
        timeout_s = self._gateway.settings.default_timeout_s
        message = await self._message(request, context, timeout_s, MAX_READ_BYTES)
        return await read(self._gateway, name, _parsed(READ[name], message))

    async def _infer(self, request: GatewayRequest, context: Context) -> bytes:
        gateway, settings = self._gateway, self._gateway.settings
        left_s = context.time_remaining()
        timeout_s = settings.max_timeout_s if left_s is None else min(left_s, settings.max_timeout_s)
        gateway.quotas.take(request.key)
        headers = inference.forwarded_headers(request)
        gateway.admission.check(timeout_s, request.owner)
        message = await self._message(request, context, timeout_s, self._max_bytes)
        request.end_stage("receive")
        given = _parsed(v2.ModelInferRequest, message)
        path = inference.path_of(given.model_name, given.model_version)
        checked = check_message(settings, given)
        response = await inference.run(gateway, request, path, headers, checked, timeout_s)
        request.model_name = given.model_name
        # Without binary data, the whole body is JSON.
        json_bytes = int(response.headers.get(inference.LENGTH, len(response.body)))
        answer = to_message(response.body, json_bytes)
        return bytes(answer.SerializeToString())

    async def _message(
        self, request: GatewayRequest, context: Context, timeout_s: float, max_bytes: int
    ) -> bytes:
        """Receive the message of a call within the limits of its key.

        Raises:
            Failure: it is late, or too large.
        """
        try:
            async with asyncio.timeout(timeout_s):
                message = await context.read()
        except TimeoutError:
            raise Failure("body_timeout", f"the message did not arrive within {timeout_s:.3g} s") from None
        if not isinstance(message, bytes):
            raise invalid_request("expected one message, got none")
        if len(message) > max_bytes:
            raise Failure(
                "too_large", f"expected at most {format_bytes(max_bytes)}, got {format_bytes(len(message))}"
            )
        self._gateway.uploads.buffers.take(request.key, len(message))
        request.body_bytes = len(message)
        return message


async def _abort(context: Context, request: GatewayRequest, failure: Failure) -> bytes:
    request.outcome = failure.code
    status = _STATUS.get(failure.code, grpc.StatusCode.INTERNAL)
    await context.abort(status, failure.v2_message, _trailers(failure))
    raise AssertionError  # abort raises


def _parsed(kind: type[Message], message: bytes) -> Any:
    try:
        return kind.FromString(message)
    except DecodeError:
        raise invalid_request(f"expected a message {kind.DESCRIPTOR.name}") from None


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", "replace")


def _trailers(failure: Failure) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode(), value.decode()) for name, value in failure.headers if name == b"retry-after")


async def _nothing() -> Any:
    raise AssertionError

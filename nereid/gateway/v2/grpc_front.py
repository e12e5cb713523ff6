"""The v2 protocol over gRPC: health, metadata and inference."""

import asyncio
import logging
import socket
import ssl
from functools import partial
from math import inf
from typing import Any

from nereid.gateway.admission.access import Need, identify
from nereid.gateway.admission.holders import KEY, PEER, Holders
from nereid.gateway.failures import Failure, GrpcStatus, invalid_request
from nereid.gateway.http.http_request import GatewayRequest
from nereid.gateway.http.middleware import FAULTS, GATEWAY_FAILED
from nereid.gateway.http.tls import BACKLOG, TlsListener
from nereid.gateway.state import Gateway
from nereid.gateway.v2 import inference
from nereid.gateway.v2.grpc_call import GrpcCall, trailers
from nereid.gateway.v2.grpc_connection import HEAD, GrpcConnection, Headers
from nereid.gateway.v2.grpc_reads import HEALTH_CHECK, READ, read
from nereid.gateway.v2.message import parse, read_request, to_message

log = logging.getLogger("nereid.gateway")
SERVICE, CONTENT = "/inference.GRPCInferenceService/", b"application/grpc"
INFER = "ModelInfer"
OPEN = ("ServerLive", "ServerReady", HEALTH_CHECK)
MAX_READ_BYTES = 4096
# Framing of the tensors of an image of the largest size.
MAX_FRAME_BYTES = 2**20
# Connections in all; the oldest without a key gives way. Open calls that show no key, of all addresses.
MAX_CONNECTIONS, MAX_KEYLESS_CALLS = 2048, 128
CHECK_S, STOP_POLL_S, ANSWER_S = 1.0, 0.02, 1.0
# Seconds in one unit of the header `grpc-timeout`.
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class GrpcFront:
    """Checks each call, and passes it to Triton over HTTP.

    Args:
        gateway: settings, keys and limits.
        keep_alive_s: seconds after which an unused connection is closed.
    """

    def __init__(self, gateway: Gateway, keep_alive_s: float) -> None:
        self._gateway, self._tracer, self.keep_alive_s = gateway, gateway.tracer, keep_alive_s
        self._max_bytes = gateway.settings.max_body_bytes + MAX_FRAME_BYTES
        self.holders, self.connections = Holders(), dict[GrpcConnection, None]()
        self.keyless_calls = 0

    async def start(self, opened: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Listen on a socket; with a context, over TLS."""
        protocol = partial(GrpcConnection, self)
        self._server: TlsListener | asyncio.Server
        if tls:
            self._server = TlsListener(opened, tls, protocol)
        else:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(protocol, sock=opened, backlog=BACKLOG)
        self._checking = asyncio.create_task(self._check())

    async def _check(self) -> None:
        """End connections whose time is over."""
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = asyncio.get_running_loop().time()
            for connection in [*self.connections]:
                connection.check(now_s)

    async def stop(self, grace_s: float) -> None:
        """Let calls in flight finish within a time, and close all connections."""
        self._server.close()
        for connection in [*self.connections]:
            connection.drain()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while (elapsed_s := loop.time() - began_s) < grace_s:
            # An idle client may have sent a call before it knew, or never answer.
            if not any(each.calls or elapsed_s < ANSWER_S for each in self.connections):
                break
            await asyncio.sleep(STOP_POLL_S)
        self._checking.cancel()
        for connection in [*self.connections]:
            connection.abort()

    def admits(self, connection: GrpcConnection) -> bool:
        """Return whether there is room for a connection; the oldest without a key gives way."""
        if len(self.connections) <= MAX_CONNECTIONS:
            return True
        if oldest := next((each for each in self.connections if each.gives_way), None):
            oldest.calm("too many connections")
        return oldest is not connection and oldest is not None

    def begin(self, connection: GrpcConnection, stream: int, headers: Headers) -> None:
        """Begin a call, or reject it before its message is received."""
        fields = dict(headers)
        name = fields.get(b":path", b"").decode("latin-1").removeprefix(SERVICE)
        is_call = fields.get(b":method") == b"POST" and fields.get(b"content-type", b"").startswith(CONTENT)
        peer = self.holders.find(connection.peer, PEER)
        request = GatewayRequest({"method": "gRPC", "path": name, "headers": headers}, _nothing, self._tracer)
        request.endpoint, request.is_inference = name, name == INFER
        call = GrpcCall(self._gateway, connection, stream, request, peer)
        failure = self._identify(call, connection) if is_call and (name in READ or name == INFER) else None
        if not call.is_identified and not peer.begins.take(1):
            connection.calm("too many calls without a key")
        elif not is_call:
            connection.respond(stream, None, [(b":status", b"415")])
        elif name != INFER and name not in READ:
            connection.respond(stream, None, [*HEAD, *trailers(GrpcStatus.UNIMPLEMENTED, "unknown method")])
        else:
            try:
                if failure:
                    raise failure
                self._admit(call, fields)
            except Failure as failure:
                call.fail(failure)

    def _identify(self, call: GrpcCall, connection: GrpcConnection) -> Failure | None:
        """Find the key of a call; return what is wrong with it."""
        request, settings = call.request, self._gateway.settings
        need: Need = "open" if request.endpoint in OPEN else "infer"
        try:
            request.reject_repeats()
            request.key = identify(self._gateway.keys, settings.requires_keys, request.headers, need)
        except Failure as failure:
            return failure
        if need == "infer":
            call.is_identified = True
            call.holder = self.holders.find(request.owner or connection.peer, KEY)
            connection.identify(call.holder)
        return None

    def _admit(self, call: GrpcCall, fields: dict[bytes, bytes]) -> None:
        """Let a call send its message.

        Raises:
            Failure: the call is invalid, or over a limit.
        """
        gateway, settings, request = self._gateway, self._gateway.settings, call.request
        encoding = fields.get(b"grpc-encoding", b"identity")
        if encoding != b"identity":  # unpacking has no limit of its own
            expected = "expected a message without compression"
            raise Failure("unsupported_media_type", f"{expected}, got {encoding[:32].decode('latin-1')!r}")
        is_full = call.holder.calls >= call.holder.allowance.calls
        if is_full or (not call.is_identified and self.keyless_calls >= MAX_KEYLESS_CALLS):
            raise Failure("overloaded", "too many calls are open; retry later", 1.0)
        left_s = timeout_of(fields.get(b"grpc-timeout"))
        if request.endpoint != INFER:
            call.expect(self, min(left_s, settings.default_timeout_s), MAX_READ_BYTES)
            return
        timeout_s = min(left_s, settings.max_timeout_s)
        gateway.quotas.take(request.key)
        call.headers, request.limit_s = request.forwarded(), timeout_s
        gateway.admission.check(timeout_s, request.owner)
        call.expect(self, timeout_s, self._max_bytes)

    async def handle(self, call: GrpcCall) -> None:
        """Answer a call whose message is complete."""
        try:
            call.answer(await (self._infer if call.request.is_inference else self._read)(call))
        except Failure as failure:
            if failure.code in FAULTS:
                log.warning("request %s: %s: %r", call.request.request_id, failure.code, failure.__cause__)
            call.fail(failure)
        except Exception:
            log.exception("request %s failed", call.request.request_id)
            call.fail(Failure("inference_failed", GATEWAY_FAILED))

    async def _read(self, call: GrpcCall) -> bytes:
        name = call.request.endpoint
        return await read(self._gateway, name, parse(READ[name], call.take_message()))

    async def _infer(self, call: GrpcCall) -> bytes:
        gateway, request = self._gateway, call.request
        request.end_stage("receive")
        name, path, checked = await read_request(gateway.settings, call.take_message())
        response = await inference.run(gateway, request, path, call.headers, checked)
        request.model_name = name
        # Without binary data, the whole body is JSON.
        json_bytes = int(response.headers.get(inference.LENGTH, len(response.body)))
        return bytes(to_message(response.body, json_bytes).SerializeToString())


def timeout_of(value: bytes | None) -> float:
    """Return the seconds that a caller waits, from the value of `grpc-timeout`.

    Raises:
        Failure: the value is invalid.
    """
    if value is None:
        return inf
    digits, unit = value[:-1], _UNITS.get(value[-1:])
    if unit is None or not digits.isdigit() or len(digits) > 8:
        raise invalid_request(
            f"grpc-timeout: expected a value such as 250m, got {value[:32].decode('latin-1')!r}"
        )
    return int(digits) * unit


async def _nothing() -> Any:
    raise AssertionError

"""The v2 protocol over gRPC: health, metadata and inference."""

import asyncio
import socket
import ssl
from functools import partial
from http import HTTPStatus
from math import inf
from typing import Any, NamedTuple
from urllib.parse import quote

from google.protobuf import json_format
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as v2

from nereid.base.units import format_bytes
from nereid.gateway import inference
from nereid.gateway.failures import CLIENT_CLOSED, Failure, GrpcStatus, from_triton, invalid_request
from nereid.gateway.http.http_request import GatewayRequest
from nereid.gateway.http.middleware import finish_request, logged_failure
from nereid.gateway.keys import RequiredScope, identify
from nereid.gateway.state import Gateway
from nereid.gateway.tls import BACKLOG, TlsListener
from nereid.gateway.v2.grpc_connection import (
    GRACE_PERIOD_S,
    KEY_LIMITS,
    PEER_LIMITS,
    RESPONSE_HEADERS,
    ClientLimits,
    ClientUsage,
    GrpcConnection,
    Headers,
)
from nereid.gateway.v2.message import parse_message, read_request, to_message

HEALTH_CHECK = "/grpc.health.v1.Health/Check"


class ReadMethod(NamedTuple):
    """A read-only method, whose request contains at most a model's name and version.

    Attributes:
        path: Triton's path; without `/v2`, relative to the model's path.
        flag: the field of the response that says whether Triton's status was 200; "" for none.
    """

    request: type[Message]
    path: str
    flag: str = ""
    need: RequiredScope = "infer"


READ_METHODS = {
    "ServerLive": ReadMethod(v2.ServerLiveRequest, "/v2/health/live", "live", "open"),
    "ServerReady": ReadMethod(v2.ServerReadyRequest, "/v2/health/ready", "ready", "open"),
    HEALTH_CHECK: ReadMethod(v2.ServerReadyRequest, "/v2/health/ready", need="open"),
    "ServerMetadata": ReadMethod(v2.ServerMetadataRequest, "/v2"),
    "ModelReady": ReadMethod(v2.ModelReadyRequest, "/ready", "ready"),
    "ModelMetadata": ReadMethod(v2.ModelMetadataRequest, ""),
    "ModelConfig": ReadMethod(v2.ModelConfigRequest, "/config"),
    "ModelStatistics": ReadMethod(v2.ModelStatisticsRequest, "/stats"),
}
# HealthCheckResponse messages for NOT_SERVING and SERVING. Source: grpc/health/v1/health.proto.
_SERVING = (b"\x08\x02", b"\x08\x01")


async def read(gateway: Gateway, name: str, request: Any) -> bytes:
    """Return the response to the request of a method in `READ_METHODS`, as an encoded message.

    Raises:
        Failure: Triton rejected or failed the request.
    """
    response = await inference.get_from_triton(gateway, _path(name, request))
    is_ok = response.status == HTTPStatus.OK
    if name == HEALTH_CHECK:
        return _SERVING[is_ok]
    message = getattr(v2, f"{name}Response")()
    if flag := READ_METHODS[name].flag:
        setattr(message, flag, is_ok)
    elif not is_ok:
        raise from_triton(response)
    else:
        content = message.config if name == "ModelConfig" else message
        json_format.Parse(response.body, content, ignore_unknown_fields=True)
    return bytes(message.SerializeToString())


def _path(name: str, request: Any) -> str:
    """Return Triton's path for a request.

    Raises:
        Failure: no model can have that name or version.
    """
    path = READ_METHODS[name].path
    if path.startswith("/v2"):
        return path
    if name == "ModelStatistics" and not request.name:
        return "/v2/models/stats"
    return inference.checked_path(request.name, request.version) + path


# Each message's prefix: a compression flag and the length. Source: grpc/doc/PROTOCOL-HTTP2.md.
PREFIX_BYTES = 5
# Characters of a status message that need no escaping.
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def trailers(status: GrpcStatus, message: str = "", more: Headers | None = None) -> Headers:
    """Return the trailers with a call's outcome."""
    headers = [(b"grpc-status", b"%d" % status), *(more or ())]
    return [*headers, (b"grpc-message", quote(message, _PRINTABLE).encode())] if message else headers


OK_TRAILERS = trailers(GrpcStatus.OK)


class GrpcCall:
    """A call from its headers to the end of its answer.

    Args:
        connection, stream: where the call came from.
        client: the client that the call is counted against.

    Attributes:
        is_identified: whether the call passed the key check for inferences; keyless methods have none.
        is_complete: whether the whole message has arrived.
        headers: headers for a route.
        timeout_s: time limit in seconds, measured from the arrival of the headers.
    """

    def __init__(
        self,
        server: "GrpcServer",
        connection: GrpcConnection,
        stream: int,
        request: GatewayRequest,
        client: ClientUsage,
    ) -> None:
        self._server, self._connection, self._stream = server, connection, stream
        self._gateway, self.request, self.client = server.gateway, request, client
        self.is_identified = self.is_complete = self._is_counted = self._is_over = False
        self.headers, self.timeout_s = Headers(), 0.0
        self._message = bytearray()
        self._length = 0
        self._max_bytes = 0
        self._answer_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, timeout_s: float, max_bytes: int) -> None:
        """Start receiving the message, within a time and size limit."""
        self.timeout_s, self._max_bytes, self._is_counted = timeout_s, max_bytes, True
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end_late)
        self._connection.calls[self._stream] = self
        self._count(1)

    def _count(self, change: int) -> None:
        if self._is_counted:
            self.client.calls += change
            if not self.is_identified:
                self._server.keyless_calls += change

    def receive(self, data: bytes | bytearray) -> None:
        """Count and store the next bytes of the message; end the call if there are too many."""
        try:
            self._gateway.uploads.buffers.acquire(self.request.key_id, len(data))
            self.request.body_bytes += len(data)
            self._message += data  # do not reserve memory for bytes that may never arrive
            if not self._length and len(self._message) >= PREFIX_BYTES:
                self._read_prefix()
            if len(self._message) > (self._length or PREFIX_BYTES):
                raise invalid_request("expected one message, got more")
        except Failure as failure:
            self.fail(failure)

    def _read_prefix(self) -> None:
        size = int.from_bytes(self._message[1:PREFIX_BYTES])
        if self._message[0]:
            raise Failure("unsupported_media_type", "expected a message without compression")
        if size > self._max_bytes:
            raise Failure(
                "too_large", f"expected at most {format_bytes(self._max_bytes)}, got {format_bytes(size)}"
            )
        self._length = PREFIX_BYTES + size
        self._connection.grow_window(self._stream, self._length)

    def complete(self) -> None:
        """Answer the call, because its message is complete."""
        self._stop_timer()
        if not self._length or len(self._message) < self._length:
            self.fail(invalid_request("expected one message, got none"))
            return
        self.is_complete = True
        self._task = asyncio.create_task(self._server.handle(self))

    def _end_late(self) -> None:
        self.fail(Failure("body_timeout", f"the message did not arrive within {self.timeout_s:.3g} s"))

    def take_message(self) -> memoryview:
        """Return the message and release the call's reference to it."""
        message, self._message = self._message, bytearray()
        return memoryview(message)[PREFIX_BYTES:]

    def answer(self, message: bytes) -> None:
        """Send the answer; what the client's window does not allow yet counts as held by the caller.

        Raises:
            Failure: the caller already holds too much.
        """
        if self._is_over:
            return
        self._gateway.uploads.buffers.acquire(self.request.key_id, len(message))
        self._answer_bytes = len(message)
        self._connection.respond(self._stream, self, OK_TRAILERS, message)
        if not self._is_over:
            abandon = self._connection.abandon
            self._timer = asyncio.get_running_loop().call_later(GRACE_PERIOD_S, abandon, self._stream)

    def fail(self, failure: Failure) -> None:
        """Send an error."""
        if self._is_over:
            return
        self.request.outcome = failure.code
        more = [(name, value) for name, value in failure.headers if name == b"retry-after"]
        headers = [*RESPONSE_HEADERS, *trailers(failure.kind.grpc, failure.v2_message, more)]
        self._connection.respond(self._stream, self, headers)

    def cancel(self) -> None:
        """End the call without an answer."""
        if self._is_over:
            return
        self.request.outcome = CLIENT_CLOSED
        self.finish()
        if self._task:
            self._task.cancel()

    def finish(self) -> None:
        """Release what the call holds and record its outcome."""
        if self._is_over:
            return
        self._is_over = True
        self._stop_timer()
        self._count(-1)
        self._message = bytearray()
        self._gateway.uploads.buffers.release(self.request.key_id, self._answer_bytes)
        task = self._task
        if task and not task.done() and task is not asyncio.current_task():
            # A thread may still hold the message of a cancelled call.
            task.add_done_callback(lambda _: finish_request(self._gateway, self.request))
        else:
            asyncio.get_running_loop().call_soon(finish_request, self._gateway, self.request)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


SERVICE, CONTENT = "/inference.GRPCInferenceService/", b"application/grpc"
INFER_METHOD = "ModelInfer"
MAX_READ_BYTES = 4096
# Allowance for the tensor framing of an image of the maximum size.
MAX_FRAME_BYTES = 2**20
# Maximum connections (then the oldest without a key is closed), and open keyless calls of all addresses.
MAX_CONNECTIONS, MAX_KEYLESS_CALLS = 2048, 128
# Maximum clients remembered; beyond that, those that hold nothing are dropped.
MAX_IDLE = 4096
CHECK_INTERVAL_S, STOP_POLL_INTERVAL_S, DRAIN_ANSWER_TIMEOUT_S = 1.0, 0.02, 1.0
# Seconds in one unit of the header `grpc-timeout`.
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}


class GrpcServer:
    """Checks each call and passes it to Triton over HTTP.

    Args:
        keep_alive_s: idle connection timeout, in seconds.
    """

    def __init__(self, gateway: Gateway, keep_alive_s: float) -> None:
        self.gateway, self._tracer, self.keep_alive_s = gateway, gateway.tracer, keep_alive_s
        self._max_bytes = gateway.settings.max_body_bytes + MAX_FRAME_BYTES
        self.clients = dict[tuple[str, ClientLimits], ClientUsage]()
        self.connections = dict[GrpcConnection, None]()
        self.keyless_calls = 0

    async def start(self, opened: socket.socket, tls: ssl.SSLContext | None) -> None:
        """Listen on a socket, over TLS if a context is given."""
        protocol = partial(GrpcConnection, self)
        self._server: TlsListener | asyncio.Server
        if tls:
            self._server = TlsListener(opened, tls, protocol)
        else:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(protocol, sock=opened, backlog=BACKLOG)
        self._checking = asyncio.create_task(self._check())

    async def _check(self) -> None:
        """End connections whose time limit has expired."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            now_s = asyncio.get_running_loop().time()
            for connection in [*self.connections]:
                connection.check(now_s)

    async def stop(self, grace_s: float) -> None:
        """Let calls in flight finish within a time limit, then close all connections."""
        self._server.close()
        for connection in [*self.connections]:
            connection.drain()
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while (elapsed_s := loop.time() - started_at) < grace_s:
            # An idle client may have sent a call before it knew, or may never respond.
            if not any(peer.calls or elapsed_s < DRAIN_ANSWER_TIMEOUT_S for peer in self.connections):
                break
            await asyncio.sleep(STOP_POLL_INTERVAL_S)
        self._checking.cancel()
        for connection in [*self.connections]:
            connection.abort()

    def admits(self, connection: GrpcConnection) -> bool:
        """Return whether there is room for a connection, closing the oldest without a key if necessary."""
        if len(self.connections) <= MAX_CONNECTIONS:
            return True
        if oldest := next((candidate for candidate in self.connections if candidate.is_evictable), None):
            oldest.close_over_limit("too many connections")
        return oldest is not connection and oldest is not None

    def find_client(self, name: str, limits: ClientLimits) -> ClientUsage:
        """Return the client with the given name and limits, creating it if necessary."""
        if client := self.clients.get((name, limits)):
            return client
        if len(self.clients) >= MAX_IDLE:
            self.clients = {n: usage for n, usage in self.clients.items() if usage.connections or usage.calls}
        client = self.clients[name, limits] = ClientUsage(limits)
        return client

    def begin(self, connection: GrpcConnection, stream: int, headers: Headers) -> None:
        """Start a call, or reject it before its message is received."""
        request = GatewayRequest({"method": "gRPC", "headers": headers}, _nothing, self._tracer)
        fields = request.headers
        name = request.scope["path"] = fields.get(b":path", b"").decode("latin-1").removeprefix(SERVICE)
        is_call = fields.get(b":method") == b"POST" and fields.get(b"content-type", b"").startswith(CONTENT)
        peer = self.find_client(connection.peer, PEER_LIMITS)
        request.endpoint, request.is_inference = name, name == INFER_METHOD
        call = GrpcCall(self, connection, stream, request, peer)
        failure = (
            self._identify(call, connection)
            if is_call and (name in READ_METHODS or name == INFER_METHOD)
            else None
        )
        if not call.is_identified and not peer.keyless_starts.take(1):
            connection.close_over_limit("too many calls without a key")
        elif not is_call:
            connection.respond(stream, None, [(b":status", b"415")])
        elif name != INFER_METHOD and name not in READ_METHODS:
            connection.respond(
                stream, None, [*RESPONSE_HEADERS, *trailers(GrpcStatus.UNIMPLEMENTED, "unknown method")]
            )
        else:
            try:
                if failure:
                    raise failure
                self._admit(call)
            except Failure as failure:
                call.fail(failure)

    def _identify(self, call: GrpcCall, connection: GrpcConnection) -> Failure | None:
        """Find a call's key; return what is wrong with it, if anything."""
        request, gateway = call.request, self.gateway
        need = "infer" if request.is_inference else READ_METHODS[request.endpoint].need
        try:
            request.reject_repeats()
            request.key = identify(gateway.keys, gateway.requires_keys, request.headers, need)
        except Failure as failure:
            return failure
        if need == "infer":
            call.is_identified = True
            call.client = self.find_client(request.key_id or connection.peer, KEY_LIMITS)
            connection.identify(call.client)
        return None

    def _admit(self, call: GrpcCall) -> None:
        """Allow a call to send its message.

        Raises:
            Failure: the call is invalid or over a limit.
        """
        gateway, settings, request = self.gateway, self.gateway.settings, call.request
        fields = request.headers
        encoding = fields.get(b"grpc-encoding", b"identity")
        if encoding != b"identity":  # decompression has no limit of its own
            expected = "expected a message without compression"
            raise Failure("unsupported_media_type", f"{expected}, got {encoding[:32].decode('latin-1')!r}")
        is_full = call.client.calls >= call.client.limits.calls
        if is_full or (not call.is_identified and self.keyless_calls >= MAX_KEYLESS_CALLS):
            raise Failure("overloaded", "too many calls are open; retry later", 1.0)
        client_timeout_s = timeout_of(fields.get(b"grpc-timeout"))
        if request.endpoint != INFER_METHOD:
            call.expect(min(client_timeout_s, settings.default_timeout_s), MAX_READ_BYTES)
            return
        timeout_s = min(client_timeout_s, settings.max_timeout_s)
        gateway.quotas.take(request.key)
        call.headers, request.limit_s = request.forwarded(), timeout_s
        gateway.admission.check(timeout_s, request.key_id)
        call.expect(timeout_s, self._max_bytes)

    async def handle(self, call: GrpcCall) -> None:
        """Answer a call whose message is complete."""
        try:
            call.answer(await (self._infer if call.request.is_inference else self._read)(call))
        except Exception as error:
            call.fail(logged_failure(call.request, error))

    async def _read(self, call: GrpcCall) -> bytes:
        name = call.request.endpoint
        return await read(self.gateway, name, parse_message(READ_METHODS[name].request, call.take_message()))

    async def _infer(self, call: GrpcCall) -> bytes:
        gateway, request = self.gateway, call.request
        request.end_stage("receive")
        name, path, checked = await read_request(gateway.settings, call.take_message())
        response = await inference.run_tensors(gateway, request, path, call.headers, checked)
        request.model_name = name
        # Without binary data, the whole body is JSON.
        json_bytes = int(response.headers.get(inference.JSON_LENGTH_HEADER, len(response.body)))
        return bytes(to_message(response.body, json_bytes).SerializeToString())


def timeout_of(value: bytes | None) -> float:
    """Return how many seconds a caller waits, given the value of `grpc-timeout`.

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

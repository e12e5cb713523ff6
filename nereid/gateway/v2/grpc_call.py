"""One call of gRPC: its message while it arrives, its answer, and what both hold."""

import asyncio
from typing import Protocol
from urllib.parse import quote

from nereid.base.units import format_bytes
from nereid.gateway.admission.holders import Holder
from nereid.gateway.failures import Failure, GrpcStatus, invalid_request
from nereid.gateway.http.http_request import GatewayRequest
from nereid.gateway.http.middleware import record
from nereid.gateway.state import CLIENT_CLOSED, Gateway
from nereid.gateway.v2.grpc_connection import GRACE_S, HEAD, GrpcConnection, Headers

# Before each message: whether it is compressed, and its length. Source: grpc/doc/PROTOCOL-HTTP2.md.
PREFIX_BYTES = 5
# The characters of a message that need no escape.
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


def trailers(status: GrpcStatus, message: str = "", more: Headers | None = None) -> Headers:
    """Return the trailers with the outcome of a call."""
    found = [(b"grpc-status", b"%d" % status), *(more or ())]
    return [*found, (b"grpc-message", quote(message, _PRINTABLE).encode())] if message else found


OK = trailers(GrpcStatus.OK)


class Front(Protocol):
    """What answers complete calls; it knows how many of them show no key."""

    keyless_calls: int

    async def handle(self, call: "GrpcCall") -> None:
        """Answer a call."""


class GrpcCall:
    """A call from its headers to the end of its answer.

    Args:
        gateway: limits and metrics.
        connection, stream: where the call came from.
        request: its headers and context.
        holder: whose call it is.

    Attributes:
        is_identified: whether the call needs a key and shows one, or needs none of those that others need.
        is_complete: whether the whole message is here.
        headers: headers for a route.
        timeout_s: time limit from the arrival of the headers.
    """

    def __init__(
        self,
        gateway: Gateway,
        connection: GrpcConnection,
        stream: int,
        request: GatewayRequest,
        holder: Holder,
    ) -> None:
        self._gateway, self._connection, self._stream = gateway, connection, stream
        self.request, self.holder = request, holder
        self.is_identified = self.is_complete = self._is_over = False
        self.headers, self.timeout_s = Headers(), 0.0
        self._message, self._length, self._max_bytes, self._answer_bytes = bytearray(), 0, 0, 0
        self._front: Front | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def expect(self, front: Front, timeout_s: float, max_bytes: int) -> None:
        """Receive the message within a time and size."""
        self._front, self.timeout_s, self._max_bytes = front, timeout_s, max_bytes
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._end_late)
        self._connection.calls[self._stream] = self
        self._count(1)

    def _count(self, change: int) -> None:
        if self._front:
            self.holder.calls += change
            if not self.is_identified:
                self._front.keyless_calls += change

    def receive(self, data: bytes) -> None:
        """Count and keep the next bytes of the message; too many end the call."""
        try:
            self._gateway.uploads.buffers.take(self.request.key, len(data))
            self.request.body_bytes += len(data)
            self._message += data
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
        self._connection.widen(self._stream, self._length)

    def complete(self) -> None:
        """Answer the call; its message has ended."""
        self._stop_timer()
        if not self._length or len(self._message) < self._length:
            self.fail(invalid_request("expected one message, got none"))
            return
        self.is_complete = True
        assert self._front
        self._task = asyncio.create_task(self._front.handle(self))

    def _end_late(self) -> None:
        self.fail(Failure("body_timeout", f"the message did not arrive within {self.timeout_s:.3g} s"))

    def take_message(self) -> memoryview:
        """Return the message, which this call then no longer keeps."""
        message, self._message = self._message, bytearray()
        return memoryview(message)[PREFIX_BYTES:]

    def answer(self, message: bytes) -> None:
        """Send the answer; what the client's window does not allow yet counts as held by the caller.

        Raises:
            Failure: the caller holds too much already.
        """
        if self._is_over:
            return
        self._gateway.uploads.buffers.take(self.request.key, len(message))
        self._answer_bytes = len(message)
        self._connection.respond(self._stream, self, OK, message)
        if not self._is_over:
            self._timer = asyncio.get_running_loop().call_later(GRACE_S, self._abandon)

    def _abandon(self) -> None:
        self._connection.abandon(self._stream)

    def fail(self, failure: Failure) -> None:
        """Send an error."""
        if self._is_over:
            return
        self.request.outcome = failure.code
        more = [(name, value) for name, value in failure.headers if name == b"retry-after"]
        found = [*HEAD, *trailers(failure.grpc_status, failure.v2_message, more)]
        self._connection.respond(self._stream, self, found)

    def cancel(self) -> None:
        """End the call without an answer."""
        if self._is_over:
            return
        self.request.outcome = CLIENT_CLOSED
        self.sent()
        if self._task:
            self._task.cancel()

    def sent(self) -> None:
        """Release what the call holds, and record its outcome."""
        if self._is_over:
            return
        self._is_over = True
        self._stop_timer()
        self._count(-1)
        self._message = bytearray()
        self._gateway.uploads.buffers.give_back(self.request.key, self._answer_bytes)
        asyncio.get_running_loop().call_soon(record, self._gateway, self.request)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

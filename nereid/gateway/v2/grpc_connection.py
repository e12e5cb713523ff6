"""One HTTP/2 connection with gRPC calls, within its client's limits. h2 parses; this module counts."""

import asyncio
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import DataFrame, Frame, GoAwayFrame

from nereid.gateway.http.bounded_protocol import HEAD_TIMEOUT_S, peer_of

if TYPE_CHECKING:
    from nereid.gateway.v2.grpc_server import GrpcCall, GrpcServer

# Source: RFC 9113, sections 3.4 and 6.
PREFACE_BYTES, HEAD_BYTES = 24, 9
DATA = 0
HEADERS = 1
CONTINUATION = 9
END_HEADERS = 4
# Message frames and received pieces shorter than this cost more than they carry.
MIN_DATA_BYTES, MIN_PIECE_BYTES = 1024, 64
# Maximum encoded headers of one call; decoded headers have a separate limit.
MAX_BLOCK_BYTES = 2**15
MAX_STREAMS = 256
MAX_HEADER_BYTES = 2**14
# A message that fits into a stream's window arrives without waiting for a window update.
STREAM_WINDOW, CONNECTION_WINDOW = 2**18, 2**22

# h2 formats every frame for its log even if logging is off: 40 µs for the hexadecimal digits of 80 kB.
DataFrame._body_repr = lambda frame: ""  # type: ignore[method-assign, assignment]


class HeadersTooLong(Exception):
    """The headers of one call exceed the limit."""


class FrameCosts:
    """Track the frames of one connection; `has_partial_headers` says whether headers are still arriving."""

    __slots__ = ("_block_bytes", "_head", "_skipped", "has_partial_headers")

    def __init__(self) -> None:
        self._head, self._skipped, self._block_bytes = b"", PREFACE_BYTES, 0
        self.has_partial_headers = False

    def count(self, data: bytes) -> float:
        """Return the cost of received bytes: 1 per frame, less for messages in pieces of a normal size.

        Raises:
            HeadersTooLong: a call's headers exceed the limit.
        """
        cost, at, end = max(0.0, 1 - len(data) / MIN_PIECE_BYTES), self._skipped, len(data)
        while at < end:
            missing = HEAD_BYTES - len(self._head)
            head, at = self._head + data[at : at + missing], at + missing
            if len(head) < HEAD_BYTES:
                self._head, at = head, end
                break
            self._head = b""
            length, kind = int.from_bytes(head[:3]), head[3]
            at += length
            cost += max(0.0, 1 - length / MIN_DATA_BYTES) if kind == DATA else 1
            if kind in (HEADERS, CONTINUATION):
                self._block_bytes += length
                if self._block_bytes > MAX_BLOCK_BYTES:
                    raise HeadersTooLong
                self.has_partial_headers = not head[4] & END_HEADERS
                if not self.has_partial_headers:
                    self._block_bytes = 0
        self._skipped = at - end
        return cost


class Http2(H2Connection):
    """HTTP/2 for any number of calls, even after the client has announced the end of the connection."""

    # Streams whose messages may still be arriving after an early answer.
    MAX_CLOSED_STREAMS = 8 * MAX_STREAMS

    def __init__(self) -> None:
        super().__init__(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.decoder.max_header_list_size = MAX_HEADER_BYTES
        self.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                SettingCodes.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
                SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            },
        )

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        # h2 would close the connection here, leaving calls in flight unanswered.
        return [], [ConnectionTerminated()]


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of one client; a pair is a burst, which may arrive at once, and a rate per second.

    `frames` counts frames that carry little, `resets` calls cancelled by the client, and `keyless_starts`
    calls that need no key or present no valid one.
    """

    connections: int
    calls: int
    frames: tuple[int, int]
    resets: tuple[int, int]
    keyless_starts: tuple[int, int]


PEER_LIMITS = ClientLimits(
    connections=64, calls=32, frames=(1000, 200), resets=(100, 10), keyless_starts=(200, 50)
)
KEY_LIMITS = replace(PEER_LIMITS, connections=256, calls=1024, frames=(20_000, 2000), resets=(1000, 200))


class TokenBucket:
    """A budget that refills over time.

    Args:
        burst: its capacity and initial amount.
        rate_per_s: amount gained per second.
    """

    __slots__ = ("_burst", "_left", "_rate_per_s", "_refilled_at")

    def __init__(self, burst: int, rate_per_s: int) -> None:
        self._burst, self._rate_per_s = burst, rate_per_s
        self._left, self._refilled_at = float(burst), time.monotonic()

    def take(self, amount: float) -> bool:
        """Take an amount and return whether there was enough."""
        now_s = time.monotonic()
        self.give((now_s - self._refilled_at) * self._rate_per_s)
        self._refilled_at = now_s
        if amount > self._left:
            return False
        self._left -= amount
        return True

    def give(self, amount: float) -> None:
        """Add an amount, up to the burst."""
        self._left = min(self._burst, self._left + amount)


class ClientUsage:
    """What one address or key holds: its connections, oldest first, its open calls and its budgets."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits, self.calls = limits, 0
        self.connections: dict[GrpcConnection, None] = {}
        self.frames = TokenBucket(*limits.frames)
        self.resets = TokenBucket(*limits.resets)
        self.keyless_starts = TokenBucket(*limits.keyless_starts)


# This many bytes on a connection without a key cost as much as one frame.
BYTES_PER_FRAME = 4096
# h2 buffers a frame until it is complete. Until a valid key is seen, frames are limited to HTTP/2's minimum.
KEY_FRAME_BYTES = 2**18
# What a connection may send before its address is charged, so that a key can be presented from any address.
FREE_FRAMES = 64
# Each frame takes up to 0.3 ms; if there are more, one piece is parsed per event loop iteration.
MAX_FRAMES_AT_ONCE, PIECE_BYTES = 16, 512
# After a piece of this size, let other connections run; uvloop would read 32 of them first.
TURN_BYTES = 2**15
# Frames credited for each answered call of a key: its headers, message, window updates and pings.
FRAMES_PER_CALL = 20
# Maximum unread answers, such as to pings, for a client that does not read.
MAX_UNREAD_BYTES = 2**20
# A connection ends after this time ± 10 %; calls in flight then have `GRACE_PERIOD_S` to finish.
MAX_CONNECTION_AGE_S, GRACE_PERIOD_S = 600.0, 60.0
# Seconds for a client to read why its connection is closing.
LINGER_S = 0.5
_LAST_STREAM = 2**31 - 1
_DRAINED = b"draining"
Headers = list[tuple[bytes, bytes]]
RESPONSE_HEADERS: Headers = [(b":status", b"200"), (b"content-type", b"application/grpc")]


class GrpcConnection(asyncio.Protocol):
    """Serve the calls of one connection; when over budget, send GOAWAY and finish only calls in progress."""

    def __init__(self, server: "GrpcServer") -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self._http2, self._costs = Http2(), FrameCosts()
        self._free = float(FREE_FRAMES)
        self._unparsed, self._unsent = bytearray(), dict[int, tuple[memoryview, Headers]]()
        self.calls: dict[int, GrpcCall] = {}
        self._is_paused = self._is_reading_closed = self._is_leaving = self._is_draining = False
        self._has_settings = self.is_identified = False
        self._started_at = self._received_at = self._loop.time()
        self._block_started_at = self._paused_at = 0.0
        self._ends_at = self._started_at + MAX_CONNECTION_AGE_S * random.uniform(0.9, 1.1)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the settings if there is room for this connection."""
        self._transport = cast(asyncio.Transport, transport)
        self.peer = peer_of(transport.get_extra_info("peername"))
        self.client = self._server.find_client(self.peer, PEER_LIMITS)
        tls = transport.get_extra_info("ssl_object")
        self._server.connections[self] = None
        self.client.connections[self] = None
        if (tls and tls.selected_alpn_protocol() != "h2") or not self._server.admits(self):
            transport.abort()  # type: ignore[attr-defined]
            return
        self._http2.initiate_connection()
        self._http2.increment_flow_control_window(CONNECTION_WINDOW - 2**16 + 1)
        self._write()
        if len(self.client.connections) > self.client.limits.connections:
            next(iter(self.client.connections)).close_over_limit("too many connections without a key")

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all calls."""
        self._is_reading_closed = True
        self.client.connections.pop(self, None)
        self._server.connections.pop(self, None)
        for call in [*self.calls.values()]:
            call.cancel()
        self.calls.clear()
        self._unsent.clear()

    def identify(self, client: ClientUsage) -> None:
        """Count this connection towards a key, and allow it larger frames."""
        if self.is_identified:
            return
        self.is_identified = True
        self.client.connections.pop(self, None)
        self.client = client
        client.connections[self] = None
        if len(client.connections) > client.limits.connections:
            self.close_over_limit("too many connections of a key")
            return
        self._http2.update_settings({SettingCodes.MAX_FRAME_SIZE: KEY_FRAME_BYTES})
        # Applied immediately, because grpc may send such frames before it acknowledges the setting.
        self._http2.max_inbound_frame_size = KEY_FRAME_BYTES

    def data_received(self, data: bytes) -> None:
        """Count the frames and let h2 parse them; if there are many, in pieces with other work in between."""
        if self._is_reading_closed:
            return
        self._received_at = self._loop.time()
        try:
            frames = cost = self._costs.count(data)
        except HeadersTooLong:
            self.close_over_limit("headers too long")
            return
        if not self.is_identified:
            cost += len(data) / BYTES_PER_FRAME
        free = min(cost, self._free)
        self._free -= free
        if cost > free and not self.client.frames.take(cost - free):
            self.close_over_limit("too many frames")
        elif self._unparsed or frames > MAX_FRAMES_AT_ONCE:
            if not self._unparsed:
                self._transport.pause_reading()
                self._loop.call_soon(self._parse_piece)
            self._unparsed += data
        else:
            self._parse(data)
            if len(data) >= TURN_BYTES and not self._is_reading_closed:
                self._transport.pause_reading()
                self._loop.call_soon(self._resume_reading)

    def _resume_reading(self) -> None:
        if not (self._is_reading_closed or self._transport.is_closing()):
            self._transport.resume_reading()

    def _parse_piece(self) -> None:
        piece = bytes(self._unparsed[:PIECE_BYTES])
        del self._unparsed[:PIECE_BYTES]
        if not self._is_reading_closed:
            self._parse(piece)
        if self._unparsed and not (self._is_reading_closed or self._transport.is_closing()):
            self._loop.call_soon(self._parse_piece)
        else:
            self._resume_reading()

    def _parse(self, data: bytes) -> None:
        try:
            events = self._http2.receive_data(data)
        except ProtocolError:  # h2 has queued its reply and sends nothing else
            self._end(keeps_calls=False)
            return
        for event in events:
            self._on_event(event)
            if self._is_reading_closed:
                return
        self._block_started_at = (
            (self._block_started_at or self._received_at) if self._costs.has_partial_headers else 0.0
        )
        self._write()

    def _on_event(self, event: Event) -> None:
        match event:
            case DataReceived():
                size, stream = event.flow_controlled_length or 0, event.stream_id
                call = self.calls.get(stream)
                if size:
                    self._http2.acknowledge_received_data(size, stream)
                if call:
                    call.receive(event.data or b"")
            case RequestReceived():
                if not self._is_leaving:
                    self._server.begin(self, event.stream_id, cast(Any, event.headers))
                elif self._is_open(event.stream_id):  # started after the end of the connection was announced
                    self._http2.reset_stream(event.stream_id, ErrorCodes.REFUSED_STREAM)
            case StreamEnded():
                if call := self.calls.get(event.stream_id):
                    call.complete()
            case StreamReset():
                if call := self.calls.get(event.stream_id):
                    self._forget(event.stream_id)
                    if not call.client.resets.take(1):
                        self.close_over_limit("too many calls are cancelled")
            case WindowUpdated() | RemoteSettingsChanged():
                self._has_settings = True  # a client's first frame contains them
                self._flush()
            case PingAckReceived() if event.ping_data == _DRAINED:
                self._is_leaving = True
                self._go_away(self._http2.highest_inbound_stream_id)
                self._close_if_done()
            case ConnectionTerminated():
                self._is_leaving = True
                self._close_if_done()

    def respond(
        self, stream: int, call: "GrpcCall | None", trailers: Headers, message: bytes | None = None
    ) -> None:
        """Send the answer to a call; without a message, it consists only of the given headers."""
        if not self._is_open(stream):
            self._forget(stream)
            if call:
                call.cancel()
            return
        if call is None or message is None:
            self.calls.pop(stream, None)
            self._finish(stream, call, trailers)
        else:
            self._http2.send_headers(stream, RESPONSE_HEADERS)
            framed = b"\0" + len(message).to_bytes(4) + message
            self._unsent[stream] = memoryview(framed), trailers
            self._flush_stream(stream)
        self._write()
        self._close_if_done()

    def _flush(self) -> None:
        for stream in [*self._unsent]:
            self._flush_stream(stream)
        self._close_if_done()

    def _flush_stream(self, stream: int) -> None:
        """Send as much of an answer as the client's windows allow."""
        left, trailers = self._unsent[stream]
        if not self._is_open(stream):
            self._forget(stream)
            return
        while left and not self._is_paused:
            size = min(self._http2.local_flow_control_window(stream), self._http2.max_outbound_frame_size)
            if size <= 0:
                break
            self._http2.send_data(stream, left[:size])
            left = left[size:]
            self._write()
        if left:
            self._unsent[stream] = left, trailers
            return
        del self._unsent[stream]
        self._finish(stream, self.calls.pop(stream), trailers)

    def _finish(self, stream: int, call: "GrpcCall | None", trailers: Headers) -> None:
        """Send the end of an answer, and tell the client to stop sending a message that is incomplete."""
        self._http2.send_headers(stream, trailers, end_stream=True)
        if self._is_open(stream):
            self._http2.reset_stream(stream, ErrorCodes.NO_ERROR)
        if call:
            call.finish()
            if call.is_identified:
                self.client.frames.give(FRAMES_PER_CALL)

    def _is_open(self, stream: int) -> bool:
        """Return whether a stream is writable; the client may have reset it in the same piece."""
        h2_stream = self._http2.streams.get(stream)
        return h2_stream is not None and not h2_stream.closed and not self._transport.is_closing()

    def grow_window(self, stream: int, size: int) -> None:
        """Let a message of this size, up to the connection's window, arrive without window updates."""
        if size > STREAM_WINDOW and self._is_open(stream):
            more = min(size, CONNECTION_WINDOW) - STREAM_WINDOW
            self._http2.increment_flow_control_window(more, stream)

    def abandon(self, stream: int) -> None:
        """End a call whose answer the client does not read."""
        if self._is_open(stream):
            self._http2.reset_stream(stream, ErrorCodes.CANCEL)
        self._forget(stream)
        self._write()

    def _forget(self, stream: int) -> None:
        """Cancel a call that cannot be answered."""
        self._unsent.pop(stream, None)
        if call := self.calls.pop(stream, None):
            call.cancel()

    def pause_writing(self) -> None:
        """Stop sending answers, because the client is not reading."""
        self._is_paused, self._paused_at = True, self._loop.time()

    def resume_writing(self) -> None:
        """Send the pending answers."""
        self._is_paused, self._paused_at = False, 0.0
        self._flush()
        self._write()

    def drain(self) -> None:
        """Announce the end of the connection; calls started before the client sees it are still answered."""
        if self._is_reading_closed or self._is_draining:
            return
        self._is_draining = True
        self._ends_at = min(self._ends_at, self._loop.time())
        self._go_away(_LAST_STREAM)
        self._http2.ping(_DRAINED)
        self._write()

    @property
    def is_evictable(self) -> bool:
        """Whether this connection may be closed to make room for another."""
        return not (self.is_identified or self._is_reading_closed)

    def close_over_limit(self, reason: str) -> None:
        """End the connection of a client over its budget, after authenticated calls in progress finish."""
        if self._is_reading_closed:
            return
        self._write()
        self._go_away(self._http2.highest_inbound_stream_id, ErrorCodes.ENHANCE_YOUR_CALM, reason.encode())
        self._end()

    def _end(self, keeps_calls: bool = True) -> None:
        """Stop reading; close once authenticated calls in progress are answered and the reason is sent."""
        self._write()
        self._is_reading_closed = self._is_leaving = True
        self._ends_at = min(self._ends_at, self._loop.time())
        self.client.connections.pop(self, None)
        if not self._transport.is_closing():
            self._transport.pause_reading()
        for stream, call in [*self.calls.items()]:
            if not (keeps_calls and call.is_identified and call.is_complete):
                self._forget(stream)
        self._close_if_done()

    def check(self, now_s: float) -> None:
        """End the connection if a time limit has expired."""
        is_late = not self._has_settings and now_s > self._started_at + HEAD_TIMEOUT_S
        is_late |= bool(self._block_started_at) and now_s > self._block_started_at + HEAD_TIMEOUT_S
        is_late |= bool(self._paused_at) and now_s > self._paused_at + GRACE_PERIOD_S
        is_late |= self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES and self._is_paused
        if is_late or now_s > self._ends_at + GRACE_PERIOD_S:
            self.abort()
        elif now_s > self._ends_at or (
            not self.calls and now_s > self._received_at + self._server.keep_alive_s
        ):
            self.drain()

    def abort(self) -> None:
        """Close the connection without sending anything."""
        self._transport.abort()

    def _go_away(
        self, last_stream_id: int, code: ErrorCodes = ErrorCodes.NO_ERROR, reason: bytes = b""
    ) -> None:
        # Bypass h2, which would send nothing afterwards.
        frame = GoAwayFrame(0, last_stream_id=last_stream_id, error_code=code, additional_data=reason)
        self._transport.write(frame.serialize())

    def _write(self) -> None:
        if data := self._http2.data_to_send():
            self._transport.write(data)

    def _close_if_done(self) -> None:
        if self._is_leaving and not self.calls:
            self._write()
            if self._is_reading_closed:  # closing immediately could lose what was written
                self._loop.call_later(LINGER_S, self.abort)
            else:
                self._is_reading_closed, self._ends_at = True, self._loop.time()
                self._transport.close()

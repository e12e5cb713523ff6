"""Floods of gRPC's port: messages, calls and frames without end, which end only their own connection."""

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, StreamEnded, StreamReset
from hpack import Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from loadtest.attack.attacks import CLOSED, SERVICE, Attack, Front

CALM = frozenset({ErrorCodes.ENHANCE_YOUR_CALM.name})
# One piece may have more calls than a connection may have open.
ENDED = CALM | {ErrorCodes.PROTOCOL_ERROR.name}
REFUSED, ACCEPTED = "refused", "accepted"
STREAMS, MESSAGE_BYTES, PAUSE_S = 40, 32 * 2**20, 2.0
# Frames in one piece, and pieces: more than any budget.
BATCH, BATCHES = 200, 200
_HEALTH = "/grpc.health.v1.Health/Check"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
Frames = Callable[[int], Frame | list[Frame]]


def headers(name: str, key: str = "") -> list[tuple[str, str]]:
    """Return the headers of a call."""
    fields = {":method": "POST", ":scheme": "http", ":path": name if name.startswith("/") else SERVICE + name}
    fields |= {":authority": "127.0.0.1", "content-type": "application/grpc", "te": "trailers"}
    return [*fields.items(), *([("x-api-key", key)] if key else [])]


def connect(front: Front) -> socket.socket:
    """Connect to the port of gRPC."""
    connection = socket.create_connection(("127.0.0.1", front.grpc_port), PAUSE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def messages(front: Front, name: str, key: str = "") -> str:
    """Send messages without end, as fast as the windows allow; return how they ended."""
    client = H2Connection(H2Configuration(header_encoding=None))
    client.initiate_connection()
    for stream in range(1, 2 * STREAMS, 2):
        client.send_headers(stream, headers(name, key))
        client.send_data(stream, b"\0" + (MESSAGE_BYTES + 2**20).to_bytes(4))
    left = dict.fromkeys(range(1, 2 * STREAMS, 2), MESSAGE_BYTES)
    with connect(front) as connection, suppress(TimeoutError):
        while any(left.values()):
            try:
                connection.sendall(client.data_to_send())
                data = connection.recv(2**20)
            except ConnectionError:
                return CLOSED
            if not data:
                return CLOSED
            for event in client.receive_data(data):
                if isinstance(event, ConnectionTerminated):
                    return ErrorCodes(event.error_code or 0).name
                if isinstance(event, StreamEnded | StreamReset):
                    left.pop(event.stream_id, None)
            for stream in left:
                size = min(client.local_flow_control_window(stream), left[stream])
                for at in range(0, size, client.max_outbound_frame_size):
                    client.send_data(stream, bytes(min(client.max_outbound_frame_size, size - at)))
                left[stream] -= size
    return ACCEPTED if 0 in left.values() else REFUSED


def flood(front: Front, frames: Frames, piece: int = 2**16) -> str:
    """Send frames without end, in pieces of a size; return how the connection ended."""
    numbers = count(1, 2)

    def batches() -> Iterator[bytes]:
        yield _PREFACE + SettingsFrame(0).serialize()
        for _ in range(BATCHES):
            made = [frames(next(numbers)) for _ in range(BATCH)]
            flat = [frame for one in made for frame in (one if isinstance(one, list) else [one])]
            yield b"".join(frame.serialize() for frame in flat)

    with connect(front) as connection:
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            for batch in batches():
                for at in range(0, len(batch), piece):
                    connection.sendall(batch[at : at + piece])
        received = b""
        with suppress(ConnectionResetError, TimeoutError):
            while data := connection.recv(2**16):
                received += data
    return _end_of(received)


def _end_of(received: bytes) -> str:
    """Return the error code of GOAWAY, if there is one."""
    while len(received) >= 9:
        size, kind = int.from_bytes(received[:3]), received[3]
        if kind == 7:
            return ErrorCodes(int.from_bytes(received[13:17])).name
        received = received[9 + size :]
    return CLOSED


def head(stream: int, name: str = "ServerLive", key: str = "") -> Frame:
    """Return the headers of a call, whose message does not follow."""
    block = Encoder().encode(headers(name, key))
    return HeadersFrame(stream, data=block, flags=["END_HEADERS"])


def _call(stream: int, name: str = "ServerLive", key: str = "") -> list[Frame]:
    return [head(stream, name, key), DataFrame(stream, data=bytes(5), flags=["END_STREAM"])]


def _reset(stream: int, name: str = "ServerLive") -> list[Frame]:
    return [head(stream, name), RstStreamFrame(stream, error_code=ErrorCodes.CANCEL)]


def _unknown(stream: int) -> Frame:
    frame = PingFrame(0, opaque_data=bytes(8))
    frame.type = 0xBE
    return frame


def _endless_headers(stream: int) -> Frame:
    if stream == 1:
        return HeadersFrame(1, data=Encoder().encode(headers("ServerLive")))
    return ContinuationFrame(1, data=b"\0\x01a\x01b" * 1000)


def _empty_data(stream: int) -> Frame:
    return head(1) if stream == 1 else DataFrame(1)


_LONG_BLOCK = bytes(Encoder().encode([*headers("ServerLive"), ("x-long", "a" * 2**14)]))
_MESSAGES = {
    "ServerLive": "ServerLive",
    "the health check": _HEALTH,
    "ModelReady without a key": "ModelReady",
    "ModelInfer without a key": "ModelInfer",
    "an unknown method": "/a/b",
}
_FRAMES: dict[str, Frames] = {
    "calls": _call,
    "calls of ModelInfer without a key": partial(_call, name="ModelInfer", key="none"),
    "calls of an unknown method": partial(_call, name="/a/b"),
    "cancelled calls": _reset,
    "cancelled calls of ModelInfer": partial(_reset, name="ModelInfer"),
    "pings": lambda stream: PingFrame(0, opaque_data=bytes(8)),
    "settings": lambda stream: SettingsFrame(0, settings={4: 2**16}),
    "priorities": lambda stream: PriorityFrame(stream, depends_on=0),
    "windows": lambda stream: WindowUpdateFrame(0, window_increment=1),
    "frames of an unknown type": _unknown,
    "empty data": _empty_data,
    "endless headers": _endless_headers,
    "long headers": lambda stream: HeadersFrame(stream, data=_LONG_BLOCK, flags=["END_HEADERS"]),
}
FLOODS = (
    *(
        Attack(f"gRPC: messages of {label}", partial(messages, name=name), CALM | {REFUSED, CLOSED})
        for label, name in _MESSAGES.items()
    ),
    *(Attack(f"gRPC: {label}", partial(flood, frames=frames), ENDED) for label, frames in _FRAMES.items()),
    Attack("gRPC: pieces of one byte", partial(flood, frames=_call, piece=1), CALM),
)

"""gRPC's port without Triton: what a connection may hold, while a client with a key is served."""

import asyncio
import socket
import ssl
from collections import Counter
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar

import grpc
import pytest
import uvloop
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ResponseReceived, StreamReset, TrailersReceived
from h2.settings import SettingCodes
from h2.settings import Settings as Http2Settings
from hyperframe.frame import DataFrame, GoAwayFrame, HeadersFrame
from tritonclient.grpc import service_pb2 as v2

from loadtest.attack import floods
from loadtest.attack.attacks import SERVICE, Front
from loadtest.attack.floods import FLOODS, flood, head, headers, messages
from nereid.base.http_connection import HttpConnectionPool
from nereid.gateway.http.bounded_protocol import peer_of
from nereid.gateway.settings import GatewaySettings
from nereid.gateway.tls import http2_context
from nereid.gateway.v2 import grpc_connection, grpc_server
from nereid.gateway.v2.grpc_connection import (
    KEY_LIMITS,
    MAX_FRAMES_AT_ONCE,
    PEER_LIMITS,
    TURN_BYTES,
    GrpcConnection,
)
from nereid.gateway.v2.grpc_server import GrpcServer
from tests.gateways import RING, WATCHDOG_S, Ring, asynchronous, gateway, key, until
from tests.tables import cases

KEY = (("x-api-key", "infer"),)
SETTINGS = GatewaySettings(url="127.0.0.1:1", keys_needed=True)
KEYS = Ring({**RING, "other": key("other", "infer")})
STATUSES = {code.value[0]: code.name for code in grpc.StatusCode}
LONG = [("grpc.max_send_message_length", -1)]


@asynccontextmanager
async def door(
    settings: GatewaySettings = SETTINGS,
    keep_alive_s: float = 90,
    tls: ssl.SSLContext | None = None,
    kind: type[GrpcServer] = GrpcServer,
):
    """Serve gRPC on a free port of loopback."""
    made = gateway(HttpConnectionPool(settings.url), settings, KEYS)
    server, opened = kind(made, keep_alive_s), socket.create_server(("127.0.0.1", 0))
    await server.start(opened, tls)
    try:
        yield made, server, Front(0, opened.getsockname()[1], "infer")
    finally:
        for client in Client.opened:
            await client.close()
        Client.opened.clear()
        await server.stop(5)


@asynccontextmanager
async def steady(port: int):
    """Ask for a model that cannot exist, again and again; gives the statuses."""
    statuses = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def ask() -> None:
            while True:
                statuses.append(await status(channel, "ModelMetadata", v2.ModelMetadataRequest(name="a/b")))
                await asyncio.sleep(0.01)

        await status(channel, "ModelMetadata", b"")
        task = asyncio.create_task(ask())
        yield statuses
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])


async def status(channel, name, message, metadata=KEY, **options) -> str:
    path = name if name.startswith("/") else SERVICE + name
    encoded = message if isinstance(message, bytes) else message.SerializeToString()
    try:
        await channel.unary_unary(path)(encoded, metadata=metadata, timeout=10, **options)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "OK"


@cases(
    IPv4=(("192.0.2.1", 9), "192.0.2.1"),
    IPv4_on_an_IPv6_socket=(("::ffff:192.0.2.1", 9, 0, 0), "192.0.2.1"),
    one_network_of_IPv6=(("2001:db8::ffff:1", 9, 0, 0), peer_of(("2001:db8::2",))),
    a_zone=(("fe80::1%eth0", 9, 0, 2), peer_of(("fe80::2",))),
)
def test_address_stands_for_one_client(address, expected):
    assert peer_of(address) == expected
    assert peer_of(("2001:db8:1::1",)) != expected


@pytest.mark.parametrize("attack", FLOODS, ids=lambda attack: attack.name)
@asynchronous
async def test_flood_ends_only_its_own_connection(attack):
    async with door() as (made, server, at), steady(at.grpc_port) as statuses:
        assert await asyncio.to_thread(attack.send, at) in attack.expected
        assert server.keyless_calls == 0
    assert statuses
    assert {*statuses} == {"NOT_FOUND: unknown model 'a/b'"}
    assert made.uploads.buffers._held_bytes == {}


@cases(
    streams=(partial(head, name="ModelInfer", key="infer"), "PROTOCOL_ERROR"),
    the_size_of_a_frame=(lambda *_: DataFrame(1, data=bytes(2**14 + 1)), "FRAME_SIZE_ERROR"),
)
@asynchronous
async def test_other_limits_of_a_connection(frames, expected, monkeypatch):
    monkeypatch.setattr(floods, "BATCHES", 2)  # fewer frames than the limit, even if they arrive at once
    async with door() as (_, server, at), steady(at.grpc_port) as statuses:
        assert await asyncio.to_thread(flood, at, frames) == expected

        assert sum(usage.calls for usage in server.clients.values()) <= 1
    assert {*statuses} == {"NOT_FOUND: unknown model 'a/b'"}


@asynchronous
async def test_budget_is_that_of_one_address(monkeypatch):
    """While one address is over its budget, another one without a key is served."""
    restrict(monkeypatch, PEER_LIMITS, {"keyless_starts": (5, 0)})
    async with held_server() as (url, gate, _), door(replace(SETTINGS, url=url)) as (_, _, at):
        gate.set()
        spender = await Client.connect(at, source="127.0.0.2")
        for _ in range(6):
            spender.begin("ServerLive", "", is_complete=True)
        await until(lambda: spender.is_closed)
        client, other = await Client.connect(at), await Client.connect(at, source="127.0.0.2")
        stream = client.begin("ServerLive", "", is_complete=True)
        other.begin("ServerLive", "", is_complete=True)
        await until(lambda: client.statuses and (other.statuses or other.is_closed))

        assert client.statuses == {stream: "OK"}
        assert other.gone == ErrorCodes.ENHANCE_YOUR_CALM


WHOLE = v2.ModelInferRequest(model_name="a/b", id="x" * 2**23)
BEARER = {"metadata": (("authorization", "Bearer infer"),)}


@cases(
    a_long_message=("ModelInfer", WHOLE, {}, "NOT_FOUND"),
    a_message_over_the_limit=("ModelInfer", bytes(2**26), {}, "INVALID_ARGUMENT: expected at most 33 MiB"),
    long_message_to_a_method_that_only_reads=(
        "ModelReady",
        bytes(4097),
        {},
        "INVALID_ARGUMENT: expected at most 4",
    ),
    garbage=("ModelInfer", b"\xff" * 99, {}, "INVALID_ARGUMENT: invalid request: expected a message"),
    compression=("ModelInfer", b"", {"compression": grpc.Compression.Gzip}, "UNIMPLEMENTED: expected"),
    an_unknown_method=("RepositoryIndex", b"", {}, "UNIMPLEMENTED: unknown method"),
    no_key=("ModelReady", b"", {"metadata": ()}, "UNAUTHENTICATED: an API key is required"),
    a_key_as_a_bearer=("ModelReady", b"", BEARER, "NOT_FOUND: unknown model ''"),
    another_key=("ModelInfer", b"", {"metadata": (("x-api-key", "route"),)}, "PERMISSION_DENIED"),
    two_keys=(
        "ModelInfer",
        b"",
        {"metadata": KEY * 2},
        "INVALID_ARGUMENT: invalid request: header 'x-api",
    ),
    other_letters=("ModelReady", v2.ModelReadyRequest(name="ü%"), {}, "NOT_FOUND: unknown model 'ü%'"),
    no_server=("ServerMetadata", b"", {}, "UNAVAILABLE: unavailable: the server behind"),
    no_server_health=("/grpc.health.v1.Health/Check", b"", {"metadata": ()}, "UNAVAILABLE"),
)
@asynchronous
async def test_call_is_answered(name, message, options, expected):
    async with (
        door() as (made, _, at),
        grpc.aio.insecure_channel(f"127.0.0.1:{at.grpc_port}", LONG) as channel,
    ):
        statuses = [await status(channel, name, message, **options) for _ in range(2)]

        assert [text.startswith(expected) for text in statuses] == [True, True], statuses
    assert made.uploads.buffers._held_bytes == {}


class Client:
    """One connection without gRPC's own behaviour; `statuses` by stream, and the code of GOAWAY."""

    opened: ClassVar["list[Client]"] = []

    def __init__(self) -> None:
        self.http2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        # As a client does: calls in flight go on.
        self.http2._frame_dispatch_table[GoAwayFrame] = self._on_goaway
        self.statuses: dict[int, str] = {}
        self.resets: dict[int, int] = {}
        self.gone: int | None = None
        self.is_closed = False

    def _on_goaway(self, frame: GoAwayFrame) -> tuple[list, list]:
        self.gone = frame.error_code
        return [], []

    @classmethod
    async def connect(cls, at: Front, source: str = "127.0.0.1", **settings: int) -> "Client":
        self = cls()
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", at.grpc_port, local_addr=(source, 0)
        )
        values = {SettingCodes[name]: value for name, value in settings.items()}
        self.http2.local_settings = Http2Settings(client=True, initial_values=values)
        self.http2.initiate_connection()
        self._send()
        self._reading = asyncio.create_task(self._read())
        self.opened.append(self)
        await until(lambda: self.http2.outbound_flow_control_window > 2**16 or self.is_closed)
        return self

    def _send(self) -> None:
        self.writer.write(self.http2.data_to_send())

    async def _read(self) -> None:
        with suppress(ConnectionError):
            while data := await self.reader.read(2**16):
                for event in self.http2.receive_data(data):
                    match event:
                        case TrailersReceived() | ResponseReceived():
                            if number := dict(event.headers).get("grpc-status"):
                                self.statuses[event.stream_id] = STATUSES[int(number)]
                        case StreamReset():
                            self.resets[event.stream_id] = event.error_code
                self._send()
        self.is_closed = True

    def begin(self, name: str, secret: str = "infer", size: int = 0, is_complete: bool = False) -> int:
        """Begin a call, and send a part of its message, or a whole one."""
        stream = self.http2.get_next_available_stream_id()
        self.http2.send_headers(stream, [*headers(name, secret), ("grpc-timeout", "30S")])
        declared = size if is_complete else size + 1
        sent = b"\0" + declared.to_bytes(4) + bytes(size)
        for at in range(0, len(sent), 2**14):
            self.http2.send_data(stream, sent[at : at + 2**14])
        if is_complete:
            self.http2.end_stream(stream)
        self._send()
        return stream

    def cancel(self, stream: int) -> None:
        self.http2.reset_stream(stream, 8)
        self._send()

    async def close(self) -> None:
        self.writer.close()
        await self._reading
        with suppress(ConnectionError):
            await self.writer.wait_closed()


class CountingServer(GrpcServer):
    """Counts the calls that begin in each turn of the event loop."""

    async def start(self, opened, tls) -> None:
        await super().start(opened, tls)
        self.turn, self.begun = 0, Counter()
        self.counting = asyncio.create_task(self.turns())

    async def turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    def begin(self, connection, stream, headers) -> None:
        self.begun[self.turn] += 1
        super().begin(connection, stream, headers)


@cases("name", calls="gRPC: calls", cancelled="gRPC: cancelled calls of ModelInfer")
@asynchronous
async def test_many_frames_are_parsed_in_pieces(name, monkeypatch):
    """Two hundred calls in one piece took 100 ms, for which all others waited."""
    monkeypatch.setattr(floods, "BATCHES", 2)  # more calls than the limit, but not more frames
    (attack,) = [attack for attack in FLOODS if attack.name == name]
    async with door(kind=CountingServer) as (_, server, at):
        assert await asyncio.to_thread(attack.send, at) in attack.expected

    assert server.begun.total() > 2 * MAX_FRAMES_AT_ONCE
    assert max(server.begun.values()) <= MAX_FRAMES_AT_ONCE


def test_connection_takes_turns(monkeypatch):
    """uvloop would read 32 pieces of one connection before it serves another one."""
    pieces, receive = Counter(), GrpcConnection.data_received

    def count(self, data) -> None:
        pieces[self._server.turn] += len(data) >= TURN_BYTES
        receive(self, data)

    async def run() -> None:
        async with door(kind=CountingServer) as (_, _, at):
            await asyncio.to_thread(messages, at, "ModelInfer", "infer")

    monkeypatch.setattr(GrpcConnection, "data_received", count)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(run(), WATCHDOG_S))
    assert pieces.total() > 10
    assert max(pieces.values()) == 1


@asynchronous
async def test_unfinished_messages_count():
    """A key holds its share of memory by messages that never end, and no other key's."""
    small = replace(SETTINGS, max_body_bytes=200_000, max_buffered_bytes=400_000)
    async with door(small) as (made, server, at):
        client = await Client.connect(at)
        streams = [client.begin("ModelInfer", size=120_000) for _ in range(2)]
        await until(lambda: client.statuses)
        other = await Client.connect(at)
        held = made.uploads.buffers._held_bytes["id-infer"]
        stream = other.begin("ModelReady", "other", is_complete=True)
        await until(lambda: other.statuses)
        await client.close()
        await until(lambda: not made.uploads.buffers._held_bytes)

        assert client.statuses == {streams[1]: "RESOURCE_EXHAUSTED"}
        assert held == 120_005
        assert other.statuses == {stream: "NOT_FOUND"}
        assert [usage.calls for usage in server.clients.values()] == [0] * 3


@cases(
    calls_of_a_key=(KEY_LIMITS, {"calls": 2}, "ModelInfer", "RESOURCE_EXHAUSTED"),
    calls_of_an_address=(PEER_LIMITS, {"calls": 2}, "ServerLive", "RESOURCE_EXHAUSTED"),
    calls_without_a_key=(None, {"MAX_KEYLESS_CALLS": 2}, "ServerLive", "RESOURCE_EXHAUSTED"),
)
@asynchronous
async def test_open_calls_are_limited(of, limit, name, expected, monkeypatch):
    restrict(monkeypatch, of, limit)
    async with door() as (_, _, at):
        client = await Client.connect(at)
        streams = [client.begin(name) for _ in range(3)]
        await until(lambda: client.statuses)
        client.cancel(streams[0])
        streams.append(client.begin(name))
        other = await Client.connect(at)
        stream = other.begin("ModelReady", "other", is_complete=True)
        await until(lambda: other.statuses)

        assert client.statuses == {streams[2]: expected}
        assert client.gone is None
        assert other.statuses == {stream: "NOT_FOUND"}


def restrict(monkeypatch, of, limit) -> None:
    if of is None:
        for name, value in limit.items():
            monkeypatch.setattr(grpc_server, name, value)
        return
    name, restricted = ("KEY_LIMITS" if of is KEY_LIMITS else "PEER_LIMITS"), replace(of, **limit)
    for module in (grpc_server, grpc_connection):
        monkeypatch.setattr(module, name, restricted, raising=False)


@cases(
    of_an_address=(PEER_LIMITS, {"connections": 2}, "", [True, False, False]),
    of_a_key=(KEY_LIMITS, {"connections": 2}, "infer", [False, False, True]),
    in_all=(None, {"MAX_CONNECTIONS": 2}, "", [True, False, False]),
)
@asynchronous
async def test_connections_are_limited(of, limit, secret, ends, monkeypatch):
    restrict(monkeypatch, of, limit)
    async with door() as (_, _, at):
        clients = []
        for _ in ends:
            clients.append(await Client.connect(at))
            clients[-1].begin("ModelInfer", secret, is_complete=bool(secret))
            await until(lambda: clients[-1].statuses or clients[-1].is_closed)
        await until(lambda: any(client.is_closed for client in clients))

        assert [client.gone == ErrorCodes.ENHANCE_YOUR_CALM for client in clients] == ends


@asynchronous
async def test_cancelled_calls_of_a_key_are_limited(monkeypatch):
    restrict(monkeypatch, KEY_LIMITS, {"resets": (3, 0)})
    async with door() as (_, _, at):
        client, other = await Client.connect(at), await Client.connect(at)
        for _ in range(3):
            client.cancel(client.begin("ModelInfer"))
        other.cancel(other.begin("ModelInfer", "other"))
        assert client.gone is None
        client.cancel(client.begin("ModelInfer"))
        await until(lambda: client.is_closed)

        assert client.gone == ErrorCodes.ENHANCE_YOUR_CALM
        assert other.gone is None


@cases(
    no_preface=(b"", {"HEAD_TIMEOUT_S": 0.1}, None),
    half_of_the_headers=("half", {"HEAD_TIMEOUT_S": 0.1}, None),
    nothing_to_do=("settings", {"GRACE_PERIOD_S": 0.1}, ErrorCodes.NO_ERROR),
    a_great_age=("call", {"MAX_CONNECTION_AGE_S": 0.1, "GRACE_PERIOD_S": 1}, ErrorCodes.NO_ERROR),
)
@asynchronous
async def test_time_of_a_connection_is_limited(sent, limits, goes, monkeypatch):
    monkeypatch.setattr(grpc_server, "CHECK_INTERVAL_S", 0.02)
    for name, value in limits.items():
        monkeypatch.setattr(grpc_connection, name, value)
    async with door(keep_alive_s=0.1 if sent == "settings" else 90) as (_, _, at):
        if not sent:
            reader, writer = await asyncio.open_connection("127.0.0.1", at.grpc_port)
            await reader.read()
            writer.close()
            return
        client = await Client.connect(at)
        if sent == "half":
            client.writer.write(HeadersFrame(1, data=b"").serialize())
        if sent == "call":
            client.begin("ModelInfer")
        await until(lambda: client.is_closed)

        assert client.gone == goes


@asynccontextmanager
async def held_server():
    """Accept connections, and answer with the body's status once `gate` is set; gives URL, gate and count."""
    gate, opened = asyncio.Event(), []

    async def answer(reader, writer) -> None:
        opened.append(reader)
        with suppress(asyncio.IncompleteReadError), closing(writer):
            while await reader.readuntil(b"\r\n\r\n"):
                await gate.wait()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", gate, opened


@asynchronous
async def test_stop_lets_calls_finish():
    async with held_server() as (url, gate, opened), door(replace(SETTINGS, url=url)) as (_, server, at):
        client = await Client.connect(at)
        stream = client.begin("ServerLive", is_complete=True)
        await until(lambda: opened)
        stopping = asyncio.create_task(server.stop(30))
        await until(lambda: client.gone is not None)
        gate.set()
        await stopping
        await until(lambda: client.is_closed)

        assert client.statuses == {stream: "OK"}
        assert client.gone == ErrorCodes.NO_ERROR


@asynchronous
async def test_cancelled_call_ends_its_request():
    async with held_server() as (url, gate, opened), door(replace(SETTINGS, url=url)) as (_, server, at):
        client = await Client.connect(at)
        stream = client.begin("ServerLive", is_complete=True)
        await until(lambda: opened)
        client.cancel(stream)
        await until(lambda: opened[0].at_eof())
        gate.set()

        assert server.keyless_calls == 0


@asynchronous
async def test_answer_waits_for_a_window(monkeypatch):
    monkeypatch.setattr(grpc_server, "GRACE_PERIOD_S", 0.2)
    async with held_server() as (url, gate, _), door(replace(SETTINGS, url=url)) as (made, _, at):
        gate.set()
        client = await Client.connect(at, INITIAL_WINDOW_SIZE=0)
        streams = [client.begin("ServerLive", is_complete=True) for _ in range(2)]
        await until(lambda: len(client.http2.streams) == 2 and made.uploads.buffers._held_bytes)
        client.http2.increment_flow_control_window(100, streams[0])
        client._send()
        await until(lambda: client.statuses and client.resets)

        assert client.statuses == {streams[0]: "OK"}
        assert client.resets == {streams[1]: ErrorCodes.CANCEL}
        await until(lambda: not made.uploads.buffers._held_bytes)


@asynchronous
async def test_late_message_ends_the_call():
    async with door() as (_, server, at):
        client = await Client.connect(at)
        client.http2.send_headers(1, [*headers("ModelInfer", "infer"), ("grpc-timeout", "50m")])
        client._send()
        await until(lambda: client.statuses)

        assert client.statuses == {1: "DEADLINE_EXCEEDED"}
        assert [usage.calls for usage in server.clients.values()] == [0, 0]


@asynchronous
async def test_tls(certificate):
    async with door(tls=http2_context(certificate, None)) as (_, _, at):
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        async with grpc.aio.secure_channel(f"localhost:{at.grpc_port}", credentials) as channel:
            assert await status(channel, "ModelReady", b"") == "NOT_FOUND: unknown model ''"
        other = ssl.create_default_context(cafile=certificate)
        reader, writer = await asyncio.open_connection("localhost", at.grpc_port, ssl=other)
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


@asynchronous
async def test_cancelled_call_counts_its_bytes_until_its_work_ends():
    """A thread may still have the message."""
    async with door() as (made, server, at):
        begun, ended = asyncio.Event(), asyncio.Event()

        async def handle(call) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                await ended.wait()

        server.handle = handle
        client = await Client.connect(at)
        stream = client.begin("ModelInfer", size=1000, is_complete=True)
        await begun.wait()
        client.cancel(stream)
        await until(lambda: not any(client.calls for client in server.clients.values()))
        await asyncio.sleep(0)

        assert made.uploads.buffers._held_bytes == {"id-infer": 1005}
        ended.set()
        await until(lambda: not made.uploads.buffers._held_bytes)

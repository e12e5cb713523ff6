"""The gateway's edge: heads, bodies, repeats and buffers that nobody sends who means well."""

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from clients.gateway.app import app_of
from ops import gateway as command
from tests.gateways import RING, Upstream, gateway

WATCHDOG_S = 20
POST = b"POST /predict HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


class Wire(asyncio.Transport):
    """The gateway's end of a connection; keeps what is written until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = asyncio.Event()

    def set_protocol(self, protocol) -> None:
        """Remember who is told."""
        self._protocol = protocol

    def get_protocol(self):
        """Return who is told."""
        return self._protocol

    def write(self, data: bytes) -> None:
        """Keep what the client would read."""
        self.written += data

    def close(self) -> None:
        """Take no more, and tell the protocol."""
        if not self.closed.is_set():
            self.closed.set()
            asyncio.get_running_loop().call_soon(self.get_protocol().connection_lost, None)

    def is_closing(self) -> bool:
        """Tell whether it was closed."""
        return self.closed.is_set()

    def pause_reading(self) -> None:
        """Nothing comes by itself."""

    def resume_reading(self) -> None:
        """Nothing comes by itself."""

    async def status(self) -> bytes:
        """Wait for the answer's status."""
        async with asyncio.timeout(WATCHDOG_S):
            while not self.written:
                await asyncio.sleep(0)
        return self.written[9:12]


def connect() -> tuple[command.BoundedProtocol, Wire]:
    """Return a connection to a gateway with keys, as `nereid gateway` serves it."""
    config = uvicorn.Config(app_of(gateway(Upstream(), keys=RING)), lifespan="off", log_config=None)
    protocol, wire = command.BoundedProtocol(config, ServerState(), {}), Wire()
    wire.set_protocol(protocol)
    protocol.connection_made(wire)
    return protocol, wire


@pytest.mark.parametrize(
    "sent",
    [
        [b"GET /healthz HTTP/1.1\r\nx-a: " + bytes(65) * 1024],
        [b"GET /healthz HTTP/1.1\r\n", *[b"a:b\r\n" * 1000] * 20],
        [b"GET /" + b"a" * 70_000],
        [b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\nx-a: ", b"a" * 70_000],
    ],
    ids=["one value", "many headers", "address", "second request"],
)
def test_head_is_bounded(sent):
    """A head that does not end is refused with 431 before it takes memory and time."""

    async def run() -> Wire:
        protocol, wire = connect()
        for each in sent:
            protocol.data_received(each.replace(b"\0", b"a"))
            if b"HTTP/1.1\r\nhost" in each:
                assert await wire.status() == b"200"
        return wire

    wire = asyncio.run(run())
    assert b"HTTP/1.1 431 " in wire.written
    assert wire.is_closing()


def test_trailers_are_bounded_and_bodies_are_not():
    """What follows a body is a head, too; a body may be longer than one, in whatever pieces it comes."""

    async def run() -> tuple[Wire, Wire]:
        protocol, trailing = connect()
        protocol.data_received(CHUNKED + b"1\r\na\r\n0\r\nx-a: ")
        for _ in range(3):
            protocol.data_received(b"a" * 30_000)
        protocol, whole = connect()
        protocol.data_received(POST + b"content-length: 200000\r\n\r\n" + bytes(100_000))
        protocol.data_received(bytes(100_000))
        assert await whole.status() == b"413"
        await asyncio.sleep(0)
        return trailing, whole

    trailing, whole = asyncio.run(run())
    assert (trailing.is_closing(), trailing.written) == (True, b"")
    assert b"431" not in whole.written


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "endless"])
def test_refused_body_is_not_read_for_ever(monkeypatch, ends):
    """After an early refusal the rest is thrown away for a while: a client that ends it can ask again."""
    monkeypatch.setattr(command, "LINGER_S", 0 if not ends else 1000)

    async def run() -> None:
        protocol, wire = connect()
        protocol.data_received(POST + b"x-api-key: wrong\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        assert await wire.status() == b"401"
        assert b"connection: close" not in wire.written
        protocol.data_received(b"1\r\nb\r\n")
        if not ends:
            await asyncio.wait_for(wire.closed.wait(), WATCHDOG_S)
            return
        protocol.data_received(b"0\r\n\r\n")
        assert protocol._linger is None
        wire.written = b""
        protocol.data_received(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert await wire.status() == b"200"
        assert not wire.is_closing()

    asyncio.run(run())

"""TLS of the gateway: unfinished handshakes are limited by address, and the oldest ones end."""

import asyncio
import socket
import ssl
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
import uvicorn
import uvloop

from nereid.gateway import tls
from nereid.gateway.http import serving
from nereid.gateway.http.app import create_app
from nereid.gateway.http.bounded_protocol import BoundedProtocol
from nereid.gateway.settings import GatewayOptions
from nereid.gateway.tls import TlsListener, http2_context
from tests.gateways import Upstream, asynchronous, gateway, until
from tests.tables import cases

MINE, OTHERS = "127.0.0.1", "127.0.0.2"


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def each_loop(request):
    asyncio.set_event_loop_policy(request.param())
    yield
    asyncio.set_event_loop_policy(None)


class Echo(asyncio.Protocol):
    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)
        self._transport.close()


async def echo(port: int, certificate, source: str = MINE) -> bytes:
    """Send over TLS, and return the response."""
    context = ssl.create_default_context(cafile=certificate)
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname="localhost", local_addr=(source, 0)
    )
    writer.write(b"hello")
    answer = await reader.read()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return answer


async def silent(port: int, source: str) -> asyncio.StreamReader:
    """Connect, and send nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))
    reader.writer = writer
    return reader


@asynccontextmanager
async def listening(certificate):
    """Echo over TLS on a port, and leave no handshake behind."""
    opened = socket.create_server(("127.0.0.1", 0))
    listener = TlsListener(opened, http2_context(certificate, None), Echo)
    yield listener, opened.getsockname()[1]
    listener.close()
    await listener.wait_closed()
    assert listener._handshakes == {}


@pytest.mark.usefixtures("each_loop")
@cases(
    of_an_address=({"MAX_OF_PEER": 2}, [OTHERS] * 4 + [MINE], [True, True, False, False, False]),
    of_all=({"MAX_HANDSHAKES": 3}, [MINE, OTHERS, OTHERS, "127.0.0.3"], [False, True, False, False]),
    not_reached=({"MAX_OF_PEER": 4}, [OTHERS] * 4 + [MINE], [False] * 5),
)
@asynchronous
async def test_unfinished_handshakes_are_limited(limits, sources, closed, certificate, monkeypatch):
    """The oldest ones of the address end; clients that finish theirs are served, from any address."""
    for name, value in limits.items():
        monkeypatch.setattr(tls, name, value)

    async with listening(certificate) as (_, port):
        readers = [await silent(port, source) for source in sources]

        await until(lambda: sum(reader.at_eof() for reader in readers) >= sum(closed))
        await asyncio.sleep(0.05)
        assert [reader.at_eof() for reader in readers] == closed
        for source in (MINE, OTHERS):
            assert await echo(port, certificate, source) == b"hello"

    for reader in readers:
        assert await reader.read() == b""
        reader.writer.close()


@pytest.mark.usefixtures("each_loop")
@asynchronous
async def test_connections_that_arrive_together_are_limited(certificate, monkeypatch):
    """All of them are accepted in one turn of the event loop."""
    monkeypatch.setattr(tls, "MAX_OF_PEER", 2)

    async with listening(certificate) as (listener, port):
        clients = [socket.create_connection((MINE, port)) for _ in range(20)]
        await until(lambda: sum(map(len, listener._handshakes.values())) == 2)
        await asyncio.sleep(0.05)
        assert sum(map(len, listener._handshakes.values())) == 2

    for client in clients:
        client.close()


@pytest.mark.usefixtures("each_loop")
@asynchronous
async def test_late_handshake_ends(certificate, monkeypatch):
    monkeypatch.setattr(tls, "HEAD_TIMEOUT_S", 0.1)

    async with listening(certificate) as (_, port):
        late, wrong = [await silent(port, MINE) for _ in range(2)]
        wrong.writer.write(b"GET / HTTP/1.1\r\n\r\n")

        for reader in (late, wrong):
            with suppress(ConnectionError):
                await reader.read()
            reader.writer.close()


@asynchronous
async def test_both_ports_of_a_gateway_limit_handshakes(certificate):
    made, opened = gateway(Upstream()), socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(made), http=BoundedProtocol, ssl_certfile=certificate, log_config=None)
    config.load()
    server = serving._UvicornServer(config)
    server.lifespan = config.lifespan_class(config)
    server.gateway, server.options = made, GatewayOptions(grpc_port=0, certificate=certificate)
    server.announce = lambda ports: None

    await server.startup([opened])
    assert server.failure is None
    async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=certificate)) as client:
        answer = await client.get(f"https://localhost:{opened.getsockname()[1]}/healthz")
    listeners = [*server.servers, server.grpc._server]
    await server.shutdown([opened])

    assert answer.status_code == 200
    assert [type(listener) for listener in listeners] == [TlsListener] * 2

"""gRPC's port without Triton: what a connection may hold, while a client with a key is served."""

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from tritonclient.grpc import service_pb2 as v2

from loadtest.attack.attacks import SERVICE, Front
from loadtest.attack.floods import FLOODS
from nereid.gateway.settings import Settings
from nereid.gateway.v2.grpc_front import GrpcFront
from tests.gateways import RING, Upstream, asynchronous, gateway
from tests.tables import cases

KEY = (("x-api-key", "infer"),)
SETTINGS = Settings(url="127.0.0.1:1", keys_needed=True)
LONG = [("grpc.max_send_message_length", -1)]


@asynccontextmanager
async def door(settings: Settings = SETTINGS):
    """Serve gRPC on a free port of loopback."""
    made = gateway(Upstream(), settings, RING)
    front, opened = GrpcFront(made, 90), socket.create_server(("127.0.0.1", 0))
    await front.start(opened, None)
    try:
        yield made, front, Front(0, opened.getsockname()[1], "infer")
    finally:
        await front.stop(5)


@asynccontextmanager
async def steady(port: int):
    """Ask for a model that cannot exist, again and again; gives the statuses."""
    found = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def ask() -> None:
            while True:
                found.append(await status(channel, "ModelMetadata", v2.ModelMetadataRequest(name="a/b")))
                await asyncio.sleep(0.01)

        await status(channel, "ModelMetadata", b"")
        task = asyncio.create_task(ask())
        yield found
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


@cases("flood", {each.name: each for each in FLOODS})
@asynchronous
async def test_flood_ends_only_its_own_connection(flood):
    async with door() as (made, front, at), steady(at.grpc_port) as found:
        outcome = await asyncio.to_thread(flood.send, at)

        assert outcome in flood.expected
        assert front.keyless_calls == 0
    assert found
    assert {*found} == {"NOT_FOUND: unknown model 'a/b'"}
    assert made.uploads.buffers._held_bytes == {}


@cases(
    ["name", "message", "options", "expected"],
    {
        "a long message": (
            "ModelInfer",
            v2.ModelInferRequest(model_name="a/b", id="x" * 2**23),
            {},
            "NOT_FOUND",
        ),
        "a message over the limit": (
            "ModelInfer",
            bytes(2**26),
            {},
            "INVALID_ARGUMENT: expected at most 33 MiB",
        ),
        "4 kB to a method that only reads": (
            "ModelReady",
            bytes(4097),
            {},
            "INVALID_ARGUMENT: expected at most 4",
        ),
        "garbage": ("ModelInfer", b"\xff" * 99, {}, "INVALID_ARGUMENT: invalid request: expected a message"),
        "compression": ("ModelInfer", b"", {"compression": grpc.Compression.Gzip}, "UNIMPLEMENTED: expected"),
        "an unknown method": ("RepositoryIndex", b"", {}, "UNIMPLEMENTED: unknown method"),
        "no key": ("ModelReady", b"", {"metadata": ()}, "UNAUTHENTICATED: an API key is required"),
        "another key": ("ModelInfer", b"", {"metadata": (("x-api-key", "route"),)}, "PERMISSION_DENIED"),
        "two keys": (
            "ModelInfer",
            b"",
            {"metadata": KEY * 2},
            "INVALID_ARGUMENT: invalid request: header 'x-api",
        ),
        "a name of other letters": (
            "ModelReady",
            v2.ModelReadyRequest(name="ü%"),
            {},
            "NOT_FOUND: unknown model 'ü%'",
        ),
        "no server": ("ServerMetadata", b"", {}, "UNAVAILABLE: unavailable: the server behind"),
        "no server, health": ("/grpc.health.v1.Health/Check", b"", {"metadata": ()}, "UNAVAILABLE"),
    },
)
@asynchronous
async def test_call_is_answered(name, message, options, expected):
    async with (
        door() as (made, _, at),
        grpc.aio.insecure_channel(f"127.0.0.1:{at.grpc_port}", LONG) as channel,
    ):
        found = [await status(channel, name, message, **options) for _ in range(2)]

        assert [each.startswith(expected) for each in found] == [True, True], found
    assert made.uploads.buffers._held_bytes == {}

"""Malicious input: endless heads and bodies, repeated headers, full buffers."""

import asyncio
import base64
import json

import pytest
import uvicorn
from uvicorn.server import ServerState

from nereid.gateway.failures import Failure
from nereid.gateway.http import bounded_protocol
from nereid.gateway.http.app import create_app
from nereid.gateway.http.bounded_protocol import BoundedProtocol
from nereid.gateway.http.http_request import GatewayRequest
from nereid.gateway.http.upload import MAX_UNCOUNTED_BYTES, BatchImage, UploadBuffers, Uploads, read_form
from nereid.gateway.settings import GatewaySettings
from tests.gateways import RING, SMALL, Control, Upstream, asynchronous, gateway, send
from tests.tables import cases, rows

GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
POST = b"POST /predict HTTP/1.1\r\nhost: localhost\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


class Wire(asyncio.Transport):
    """The gateway's end of a connection; records the written bytes."""

    def __init__(self, peer: str = "a") -> None:
        super().__init__({"peername": (peer if ":" in peer else f"192.0.2.{ord(peer)}", 1)})
        self.written = b""
        self.closed = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def pause_reading(self) -> None:
        """Do nothing; the test delivers every byte."""

    resume_reading = pause_reading

    async def status(self) -> bytes:
        while not self.written:
            await asyncio.sleep(0)
        return self.written[9:12]


def connect(settings: GatewaySettings = SMALL, peer: str = "a") -> tuple[BoundedProtocol, Wire]:
    config = uvicorn.Config(create_app(gateway(Upstream(), settings, RING)), lifespan="off", log_config=None)
    protocol, wire = BoundedProtocol(config, ServerState(), {}), Wire(peer)
    wire.protocol = protocol
    protocol.connection_made(wire)
    return protocol, wire


@cases(
    "sent",
    one_value=[b"GET /healthz HTTP/1.1\r\nx-a: " + bytes(65) * 1024],
    many_headers=[b"GET /healthz HTTP/1.1\r\n", *[b"a:b\r\n" * 1000] * 20],
    address=[b"GET /" + b"a" * 70_000],
    second_request=[GET + b"GET /healthz HTTP/1.1\r\nx-a: ", b"a" * 70_000],
)
@asynchronous
async def test_head_is_bounded(sent):
    protocol, wire = connect()
    for chunk in sent:
        protocol.data_received(chunk.replace(b"\0", b"a"))
        if b"HTTP/1.1\r\nhost" in chunk:
            assert await wire.status() == b"200"

    assert b"HTTP/1.1 431 " in wire.written
    assert wire.is_closing()


@cases(
    of_an_address=({"MAX_OF_PEER": 3}, "aaaaab", [True, True, False, False, False, False]),
    of_one_IPv6_network=(
        {"MAX_OF_PEER": 2},
        [f"2001:db8::{number}" for number in range(1, 5)],
        [True, True, False, False],
    ),
    of_all=({"MAX_CONNECTIONS": 4}, "baaaac", [False, True, True, False, False, False]),
    not_reached=({"MAX_OF_PEER": 5}, "aaaaab", [False] * 6),
)
@asynchronous
async def test_many_connections_close_the_oldest_idle_one(limits, peers, closed, monkeypatch):
    monkeypatch.setattr(bounded_protocol, "_OPEN", {})
    for name, value in limits.items():
        monkeypatch.setattr(bounded_protocol, name, value)

    wires = [connect(peer=peer)[1] for peer in peers]

    assert [wire.is_closing() for wire in wires] == closed


@asynchronous
async def test_connection_with_a_request_stays(monkeypatch):
    """If all are busy, the new one is closed."""
    monkeypatch.setattr(bounded_protocol, "_OPEN", {})
    monkeypatch.setattr(bounded_protocol, "MAX_OF_PEER", 1)
    protocol, busy = connect(GatewaySettings())
    protocol.data_received(POST + b"content-length: 4\r\n\r\n")
    _, new = connect()
    protocol.data_received(b"abcd")

    assert (new.is_closing(), await busy.status()) == (True, b"200")


@asynchronous
async def test_late_head_ends_the_connection(monkeypatch):
    monkeypatch.setattr(bounded_protocol, "HEAD_TIMEOUT_S", 0.2)
    (first, slow), (second, repeated), (_, silent) = connect(), connect(), connect()
    first.data_received(b"GET /healthz HTTP/1.1\r\nhost: loc")
    second.data_received(GET)
    assert await repeated.status() == b"200"
    second.data_received(GET[:9])

    for wire in (slow, repeated, silent):
        await asyncio.wait_for(wire.closed.wait(), 10)

    assert slow.written.startswith(b"HTTP/1.1 408 ")
    assert b"HTTP/1.1 408 " in repeated.written
    assert silent.written == b""


@asynchronous
async def test_head_in_time_is_answered_late(monkeypatch):
    monkeypatch.setattr(bounded_protocol, "HEAD_TIMEOUT_S", 0.1)
    protocol, wire = connect(GatewaySettings())
    protocol.data_received(POST + b"content-length: 4\r\n\r\n")
    await asyncio.sleep(0.3)
    protocol.data_received(b"abcdGET /healthz")

    assert await wire.status() == b"200"


@asynchronous
async def test_trailers_are_bounded_and_no_headers():
    """A proxy that filters headers may pass them on: a key there counts for nothing, right or wrong."""
    protocol, keyed = connect(GatewaySettings())
    protocol.data_received(CHUNKED + b"1\r\na\r\n0\r\nx-api-key: unknown\r\n\r\n")
    protocol, trailing = connect()
    protocol.data_received(CHUNKED + b"1\r\na\r\n0\r\nx-a: ")
    for _ in range(3):
        protocol.data_received(b"a" * 30_000)
    protocol, whole = connect(GatewaySettings())
    protocol.data_received(POST + b"content-length: 200000\r\n\r\n" + bytes(100_000))
    protocol.data_received(bytes(100_000))

    assert [await keyed.status(), await whole.status()] == [b"200"] * 2
    assert (trailing.is_closing(), trailing.written) == (True, b"")


@asynchronous
async def test_rejected_body_is_read_for_a_limited_time(monkeypatch):
    monkeypatch.setattr(bounded_protocol, "LINGER_S", 0.5)
    head = POST + b"x-api-key: wrong\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n"
    (endless, cut), (ending, kept) = connect(), connect()
    for protocol, wire in ((endless, cut), (ending, kept)):
        protocol.data_received(head)
        assert await wire.status() == b"401"
        assert b"connection: close" not in wire.written
        protocol.data_received(b"1\r\nb\r\n")
    ending.data_received(b"0\r\n\r\n")

    await cut.closed.wait()
    await asyncio.sleep(0.1)  # longer than between the two requests

    kept.written = b""
    ending.data_received(GET)
    assert await kept.status() == b"200"
    assert not kept.is_closing()


@pytest.mark.parametrize("ends", [True, False], ids=["body ends", "body never ends"])
@asynchronous
async def test_rejected_body_is_read_before_the_connection_closes(monkeypatch, ends):
    """With `Connection: close`, an early rejection is not lost: the rest of the body is discarded first."""
    monkeypatch.setattr(bounded_protocol, "LINGER_S", 0.5)
    protocol, wire = connect()
    protocol.data_received(POST + b"connection: close\r\nx-api-key: wrong\r\ncontent-length: 200\r\n\r\n")
    assert await wire.status() == b"401"
    assert b"connection: close" in wire.written
    assert not wire.is_closing()

    protocol.data_received(bytes(200 if ends else 199))

    assert wire.is_closing() == ends
    await wire.closed.wait()


PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n'


@cases(
    one=(PART + b"x\r\n--b--\r\n", [BatchImage(b"x", "a.jpg")]),
    text_around_it=(b"preamble\r\n" + PART + b"x\r\n--b--epilogue", [BatchImage(b"x", "a.jpg")]),
    empty=(PART + b"\r\n--b--", [BatchImage(b"", "a.jpg")]),
    nearly_a_boundary=(PART + b"\r\n\r\n--x\r\n-b\r\n--b--", [BatchImage(b"\r\n\r\n--x\r\n-b", "a.jpg")]),
    other_case=(
        b"--b\r\na:b\r\nCONTENT-disposition:form-data; name=file\r\n\r\nx\r\n--b--",
        [BatchImage(b"x")],
    ),
    no_end=(PART + b"x", "ends early"),
    endless_head=(b"--b\r\n" + b"a" * 9000 + b"\r\n\r\nx\r\n--b--", "ends early"),
    no_part=(b"--b--", "no part 'file'"),
    no_name=(b"--b\r\n\r\nx\r\n--b--", "expected parts with the name 'file', got ''"),
    broken_boundaries=(PART + b"\r\n--b\r" * 1000, "no line of its own"),
    too_many=((PART + b"x\r\n") * 3 + b"--b--", "at most 2 parts"),
)
def test_form_is_read_or_rejected(body, expected):
    if isinstance(expected, str):
        with pytest.raises(Failure, match=expected):
            read_form(body, b"b", 2)
    else:
        assert read_form(body, b"b", 2) == expected


@cases(
    images=("POST", "/v1/classify", b'{"images":[' + b'{"image":""},' * 90_000, (400, "quotation marks")),
    weights=("PUT", "/v1/route/weights", bytes(MAX_UNCOUNTED_BYTES + 1), (413, "at most 1 MiB")),
)
def test_json_is_counted_before_it_is_decoded(method, path, body, expected):
    """Millions of small values would block all requests."""
    headers = {"content-type": "application/json", "x-api-key": "admin"}
    made = gateway(Upstream(), GatewaySettings(), RING, Control())

    answer = send(made, method, path, content=body, headers=headers)

    assert answer.status_code == expected[0]
    assert expected[1] in answer.text


@rows(("host", 400), ("x-variant", 400), ("x-api-key", 400), ("x-route-a", 400), ("accept", 200))
def test_repeated_header_is_rejected(name, status):
    """A header that a proxy could read differently must be unique; list headers may repeat."""
    headers = [("host", "localhost"), *[(name, "localhost"), (name, "localhost")][name == "host" :]]

    assert send(gateway(Upstream()), "GET", "/healthz", headers=headers).status_code == status


def test_long_header_is_not_echoed():
    headers = {"x-request-timeout-ms": "1" * 20_000}

    assert len(send(gateway(Upstream()), "POST", "/predict", headers=headers).text) < 400


def test_one_key_uses_at_most_its_share():
    buffers = UploadBuffers(100, 50)
    buffers.acquire("first", 30)
    buffers.acquire("first", 20)

    with pytest.raises(Failure, match="retry later"):
        buffers.acquire("first", 1)
    buffers.acquire("second", 30)
    buffers.acquire("", 20)
    with pytest.raises(Failure, match="retry later"):
        buffers.acquire("", 1)

    for owner, size in (("first", 20), ("first", 30), ("second", 30), ("", 20)):
        buffers.release(owner, size)
    for owner in ("first", "second"):
        buffers.acquire(owner, 50)


def test_one_key_buffers_two_of_the_largest_requests():
    """Four keys together have as much as the gateway takes."""
    settings = GatewaySettings()
    buffers, largest = Uploads(settings).buffers, settings.max_body_bytes
    for owner in "abcd":
        for _ in range(2):
            buffers.acquire(owner, largest)
        with pytest.raises(Failure, match="retry later"):
            buffers.acquire(owner, 1)


def json_request(document: object) -> GatewayRequest:
    """Return a request with a JSON body, which arrives in two pieces."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    pieces = [body[:1000], body[1000:]]

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    return GatewayRequest({"headers": [(b"content-type", b"application/json")]}, receive)


LONG_IMAGE = bytes(range(256)) * 2**13 + b"x"
LONG_TEXT = base64.b64encode(LONG_IMAGE).decode()


@cases(
    "document",
    long={"image": LONG_TEXT},
    escaped=b'{"image": "%b"}' % LONG_TEXT.replace("/", "\\/").encode(),
    spaces=b'  { "image" :\n"%b" } ' % LONG_TEXT.encode(),
)
@asynchronous
async def test_long_image_in_json_is_decoded_in_pieces(document):
    """Others had to wait for all of it."""
    order = []

    async def other() -> None:
        order.append("other")

    async def read() -> None:
        image = await Uploads(GatewaySettings()).read_image(json_request(document), 9)
        order.append("image")
        assert image == LONG_IMAGE

    await asyncio.gather(read(), other())

    assert order == ["other", "image"]


@asynchronous
async def test_long_batch_in_json_is_that_of_short_pieces():
    images = [{"image": LONG_TEXT, "id": 7}, {"image": "eA=="}, {"image": LONG_TEXT, "id": "b"}]

    batch = await Uploads(GatewaySettings()).read_batch(json_request({"images": images, "top_k": 3}), 9)

    expected = [(LONG_IMAGE, 7), (b"x", None), (LONG_IMAGE, "b")]
    assert [(image.image, image.id) for image in batch.images] == expected
    assert (batch.top_k, batch.variant) == (3, "")


@cases(
    padding_inside=({"image": "eA==" * 2**19}, "base64"),
    other_characters=({"image": "e!" * 2**20}, "base64"),
    no_padding=({"image": LONG_TEXT[:-1]}, "base64"),
    a_list=({"image": [LONG_TEXT]}, "Expected `bytes`"),
    a_number=(b'{"image": 1%b}' % (b"0" * 2**21), "Number out of range"),
    another_field=({"image": LONG_TEXT, "id": 7}, "unknown field `id`"),
    nothing=({"image": "", "x": LONG_TEXT}, "unknown field `x`"),
    many_values=({"image": LONG_TEXT, "id": [""] * 1000}, "more than 1000 quotation marks"),
)
@asynchronous
async def test_long_json_that_is_no_image_is_refused(document, reason):
    with pytest.raises(Failure, match=reason):
        await Uploads(GatewaySettings()).read_image(json_request(document), 9)


def test_buffered_bodies_count_in_the_limit():
    made = gateway(Upstream(), GatewaySettings(max_body_bytes=1000, max_buffered_bytes=2000))

    def status_while_held(held: int) -> int:
        made.uploads.buffers.acquire("", held)
        status = send(made, "POST", "/predict", content=bytes(600)).status_code
        made.uploads.buffers.release("", held)
        return status

    assert [status_while_held(held) for held in (400, 401, 400)] == [200, 429, 200]

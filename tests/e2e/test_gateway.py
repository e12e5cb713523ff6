"""The gateway in front of a real server: results, cancellation, OpenAPI."""

import asyncio
import http.client
import re
import socket
import sys
import urllib.request

import httpx
import pytest
from PIL import Image

from nereid.base.assets import CHELSEA, COFFEE
from nereid.gateway.admission import INITIAL_LIMIT
from nereid.server.ports import free_ports
from tests.deployment import running
from tests.e2e.conftest import CATS, ESPRESSO, url
from tests.gateways import check_schema
from tests.pictures import save
from tests.routes import wait_until

WATCHDOG_S = 30
PHOTO = COFFEE.read_bytes()
JPEG = {"content-type": "image/jpeg"}
CLOSED = r'nereid_gateway_requests_total\{.*"client_closed"'
# A process of its own, as in production; uvicorn is what `nereid gateway` starts, too.
RUN = f"""
import sys, uvicorn
from nereid.gateway.http.app import create_app, create_gateway
from nereid.gateway.http.bounded_protocol import BoundedProtocol
from nereid.gateway.settings import KEEP_ALIVE_S
from nereid.gateway.settings import GatewaySettings
from tests.gateways import RING, Control, Source
settings = GatewaySettings(url=sys.argv[1], max_in_flight={int(INITIAL_LIMIT)})
app = create_app(create_gateway(settings, RING, Source(Control(), "classify_v2")))
options = dict(http=BoundedProtocol, log_level="warning", access_log=False, timeout_keep_alive=KEEP_ALIVE_S)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), **options)
"""


@pytest.fixture(scope="module")
def base(both_profiles, tmp_path_factory):
    (port,) = free_ports(1)
    log, address = tmp_path_factory.mktemp("gateway") / "log", f"http://127.0.0.1:{port}"
    command = [sys.executable, "-W", "error", "-c", RUN, url(both_profiles["cpu"], "http"), str(port)]
    with running(command, log, f"{address}/readyz"):
        yield address
    assert "Traceback" not in log.read_text()


def sample(page: str, pattern: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{pattern}.* (\S+)$", page, re.MULTILINE))


def test_photo_is_recognised_in_every_kind_of_body(base):
    raw = httpx.post(f"{base}/predict?variant=v1", content=PHOTO, headers=JPEG, timeout=WATCHDOG_S)
    form = httpx.post(f"{base}/predict?variant=v1", files={"file": PHOTO}, timeout=WATCHDOG_S)
    files = [("file", PHOTO), ("file", CHELSEA.read_bytes())]
    batch = httpx.post(f"{base}/v1/classify?variant=v2", files=files, timeout=WATCHDOG_S)

    assert raw.json()["predictions"] == form.json()["predictions"]
    assert (raw.json()["variant"], raw.json()["version"], raw.json()["reason"]) == ("v1", "1", "variant")
    best = [result["predictions"][0]["index"] for result in batch.json()["results"]]
    assert best[0] == raw.json()["predictions"][0]["index"] == ESPRESSO
    assert best[1] in CATS
    assert {result["version"] for result in batch.json()["results"]} == {"2"}


async def leave(port: int, after_s: float) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(PHOTO)}\r\n\r\n"
    writer.write(head.encode() + PHOTO)
    await writer.drain()
    await asyncio.sleep(after_s)
    writer.transport.abort()


def metric(base, server, name: str) -> float:
    if name.startswith("nereid_gateway_"):
        return sample(httpx.get(f"{base}/metrics", timeout=WATCHDOG_S).text, name)
    address = f"http://{url(server, 'metrics')}/metrics"
    with urllib.request.urlopen(address, timeout=WATCHDOG_S) as page:
        return sample(page.read().decode(), name)


def test_disconnects_leave_nothing_behind(base, both_profiles):
    server, port = both_profiles["cpu"], httpx.URL(base).port
    before = metric(base, server, CLOSED)

    async def all_leave() -> None:
        for _ in range(10):
            await asyncio.gather(*(leave(port, 0.002 + index / 1000) for index in range(50)))

    asyncio.run(all_leave())
    for name in ("nereid_gateway_in_flight", "nereid_route_in_flight"):
        wait_until(lambda name=name: metric(base, server, name) == 0, name)
    wait_until(lambda: metric(base, server, CLOSED) > before, "the count")

    assert httpx.get(f"{base}/v1/live", timeout=WATCHDOG_S).json()["in_flight"] == 0
    answer = httpx.post(f"{base}/predict", content=PHOTO, headers=JPEG, timeout=WATCHDOG_S)
    assert answer.status_code == 200, answer.text


def exchange(port: int, head: str, body: bytes, closes: bool) -> http.client.HTTPResponse:
    with socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S) as connection:
        connection.sendall(f"POST /predict HTTP/1.1\r\nhost: localhost\r\n{head}\r\n\r\n".encode() + body)
        if closes:
            connection.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(connection, method="POST")
        answer.begin()
        answer.read()
        return answer


@pytest.fixture(scope="module")
def slow_image():
    """An image that takes the server longer than the client takes to close its connection."""
    return save(Image.new("RGB", (8000, 8000)))


def test_client_that_closes_its_sending_side_is_answered(base):
    """As `nc -N` and some load balancers do; the connection ends after the response."""
    image = save(Image.new("RGB", (2000, 2000)))
    port, head = httpx.URL(base).port, f"content-type: image/png\r\ncontent-length: {len(image)}"
    answer = exchange(port, head, image, True)

    assert (answer.status, answer.getheader("connection")) == (200, "close")


def test_client_that_closes_both_sides_is_cancelled(base, both_profiles, slow_image):
    """The reset that answers the gateway's interim response cancels the request, before the next one."""
    port, image = httpx.URL(base).port, slow_image
    before = metric(base, both_profiles["cpu"], CLOSED)

    with socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S) as connection:
        head = f"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(image)}\r\n\r\n"
        connection.sendall(head.encode() + image)

    wait_until(lambda: metric(base, both_profiles["cpu"], CLOSED) > before, "the count")


@pytest.mark.slow
def test_schemathesis_finds_no_fault(base, tmp_path):
    check_schema(base, tmp_path, "-H", "X-API-Key: admin")

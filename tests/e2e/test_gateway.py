"""The gateway in front of a real server: results, cancellation, OpenAPI."""

import asyncio
import http.client
import socket
import sys

import httpx
import pytest
from PIL import Image

from nereid.base.assets import CHELSEA, COFFEE
from nereid.gateway.admission import INITIAL_LIMIT
from nereid.server.ports import free_ports
from tests.deployment import running
from tests.e2e.conftest import CATS, ESPRESSO, metric, url
from tests.gateways import check_schema
from tests.pictures import save
from tests.routes import wait_until

WATCHDOG_S = 30
PHOTO = COFFEE.read_bytes()
JPEG = {"content-type": "image/jpeg"}
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
def base(fused, tmp_path_factory):
    (port,) = free_ports(1)
    log, address = tmp_path_factory.mktemp("gateway") / "log", f"http://127.0.0.1:{port}"
    command = [sys.executable, "-W", "error", "-c", RUN, url(fused, "http"), str(port)]
    with running(command, log, f"{address}/readyz"):
        yield address
    assert "Traceback" not in log.read_text()


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


def closed(base: str) -> float:
    """Return how many requests were cancelled because their clients left."""
    return metric(base.removeprefix("http://"), "nereid_gateway_requests_total", outcome="client_closed")


def test_disconnects_leave_nothing_behind(base, fused):
    port, before = httpx.URL(base).port, closed(base)

    async def all_leave() -> None:
        for _ in range(10):
            await asyncio.gather(*(leave(port, 0.002 + index / 1000) for index in range(50)))

    asyncio.run(all_leave())
    wait_until(lambda: metric(f"127.0.0.1:{port}", "nereid_gateway_in_flight") == 0, "the gateway")
    triton = url(fused, "metrics")
    wait_until(lambda: metric(triton, "nereid_route_in_flight") == 0, "the route")
    wait_until(lambda: closed(base) > before, "the count")

    assert httpx.get(f"{base}/v1/live", timeout=WATCHDOG_S).json()["in_flight"] == 0
    answer = httpx.post(f"{base}/predict", content=PHOTO, headers=JPEG, timeout=WATCHDOG_S)
    assert answer.status_code == 200, answer.text


def test_client_that_closes_its_sending_side_is_answered(base):
    """As `nc -N` and some load balancers do; the connection ends after the response."""
    image = save(Image.new("RGB", (2000, 2000)))
    head = "POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
    head += f"content-length: {len(image)}\r\n\r\n"

    with socket.create_connection(("127.0.0.1", httpx.URL(base).port), timeout=WATCHDOG_S) as connection:
        connection.sendall(head.encode() + image)
        connection.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(connection, method="POST")
        answer.begin()
        answer.read()

    assert (answer.status, answer.getheader("connection")) == (200, "close")


def test_client_that_closes_both_sides_is_cancelled(base):
    """The reset that answers the gateway's interim response cancels the request, before the next one."""
    # The server takes longer for it than the client takes to close its connection.
    image = save(Image.new("RGB", (8000, 8000)))
    port, before = httpx.URL(base).port, closed(base)

    with socket.create_connection(("127.0.0.1", port), timeout=WATCHDOG_S) as connection:
        head = f"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(image)}\r\n\r\n"
        connection.sendall(head.encode() + image)

    wait_until(lambda: closed(base) > before, "the count")


@pytest.mark.slow
def test_schemathesis_finds_no_fault(base, tmp_path):
    check_schema(base, tmp_path, "-H", "X-API-Key: admin")

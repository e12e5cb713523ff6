"""Count what one photo's request enters in the gateway: `python -m tools.gateway_calls [HOST:PORT]`.

Without the address of a server's HTTP port it starts a server. Each resumption of a coroutine is a call, too.
"""

import http.client
import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from loadtest.servers import served
from nereid.base.assets import COFFEE
from nereid.gateway.http.app import create_app, create_gateway
from nereid.gateway.http.bounded_protocol import BoundedProtocol
from nereid.gateway.keys import KeyRing
from nereid.gateway.models import FixedModels
from nereid.gateway.settings import GatewaySettings

WARM_UP, SETTLED_S = 50, 0.05
PATHS = {"REST": "/predict", "v2 over HTTP": "/v2/models/classify/infer"}
PHOTO = COFFEE.read_bytes()
HEAD = (
    "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
    f"inference-header-content-length: 0\r\ncontent-length: {len(PHOTO)}\r\n\r\n"
)


def measure(url: str) -> None:
    """Print the counts of one request of each protocol, and its calls by module."""
    gateway = create_gateway(GatewaySettings(url), KeyRing(), FixedModels(("classify",), url))
    app = create_app(gateway)
    config = uvicorn.Config(app, port=0, http=BoundedProtocol, log_level="error", proxy_headers=False)
    server = uvicorn.Server(config)
    loop, entered = config.get_loop_factory()(), Counter[str]()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered[frame.f_globals["__name__"]] += 1

    threading.Thread(target=loop.run_until_complete, args=[server.serve()], daemon=True).start()
    while not server.started:
        time.sleep(SETTLED_S)
    client = socket.create_connection(server.servers[0].sockets[0].getsockname())
    for name, path in PATHS.items():
        for _ in range(WARM_UP):
            post(client, path)
        loop.call_soon_threadsafe(sys.setprofile, note)
        time.sleep(SETTLED_S)
        entered.clear()
        post(client, path)
        time.sleep(SETTLED_S)
        loop.call_soon_threadsafe(sys.setprofile, None)
        for prefix in ("nereid.gateway", "nereid.", ""):
            counts = [count for module, count in entered.items() if module.startswith(prefix)]
            print(f"{name}, {prefix or 'in all'}: {len(counts)} modules, {sum(counts)} calls")
        print(*(f"  {count:4} {module}" for module, count in entered.most_common()), sep="\n")
    server.should_exit = True


def post(client: socket.socket, path: str) -> None:
    """Send the photo in one piece, and check the response."""
    client.sendall(HEAD.format(path).encode() + PHOTO)
    (response := http.client.HTTPResponse(client, method="POST")).begin()
    assert (response.status, bool(response.read())) == (http.client.OK, True)


if __name__ == "__main__":
    if sys.argv[1:]:
        measure(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder, served(Path(folder), os.environ) as triton:
            measure(f"127.0.0.1:{triton.options.ports.http}")

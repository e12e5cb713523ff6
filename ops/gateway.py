"""`nereid gateway`: the REST gateway in the foreground, until a signal."""

import contextlib
import json
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from clients.gateway.app import create_app
from clients.gateway.keys import InvalidKeys, KeyRing
from clients.gateway.route import RouteControl
from clients.gateway.settings import Settings
from ops.cli import CommandFailed, WrongUsage

# What a request in flight gets to end in; then its connection is closed.
STOP_S = 30


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the gateway listens; port 0 is any free one. A certificate and its key make it HTTPS."""

    host: str
    port: int
    certificate: Path | None = None
    certificate_key: Path | None = None


class _Server(uvicorn.Server):
    """Tells its port when it listens, and ends with status 0 after a signal."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            print(json.dumps({"http": sockets[0].getsockname()[1]}), flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        yield

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second signal does not wait
        self.should_exit = True


def serve(settings: Settings, listen: Listen, keys: Path | None, route: RouteControl | None) -> None:
    """Serve until SIGINT or SIGTERM; prints the port as one JSON line on stdout once it listens.

    Args:
        settings: of the gateway.
        listen: where.
        keys: file of API keys; None for none.
        route: what shows and changes the route, if that is in reach.

    Raises:
        WrongUsage: the settings cannot be meant, such as listening beyond loopback without keys.
        CommandFailed: the keys cannot be read, or the address cannot be used.
    """
    try:
        app = create_app(settings, KeyRing(keys), route)
    except ValueError as error:
        raise WrongUsage(str(error)) from None
    except InvalidKeys as error:
        raise CommandFailed(str(error)) from None
    with _open(listen) as opened:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_S,
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.certificate_key,
        )
        _Server(config).run([opened])


def _open(listen: Listen) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except OSError as error:
        raise CommandFailed(f"cannot listen on {listen.host} port {listen.port}: {error.strerror}") from None
    return opened

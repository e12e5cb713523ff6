"""The HTTP server of the gateway, in the foreground until a signal."""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nereid.errors import OperationFailed, WrongUsage
from nereid.gateway.admission.keys import KeyRing
from nereid.gateway.http.app import create_app, create_gateway
from nereid.gateway.models import ModelSource
from nereid.gateway.settings import Settings
from nereid.gateway.state import Gateway
from nereid.gateway.v2.grpc_front import GrpcFront
from nereid.processes import on_signals

# Seconds for requests in flight after a signal; then their connections are closed.
STOP_S = 30
# Load balancers keep unused connections for about 60 s. If the gateway closed one first, a request could meet
# the close, and its caller would get a 502.
KEEP_ALIVE_S = 90
# New objects before a garbage collection; Python's default of 700 is a few requests.
GC_OBJECTS = 50_000
MAX_HEAD_BYTES = 64 * 2**10
# Seconds for the head of a request, from the connection or from the head's first byte.
HEAD_S = 10.0
# Seconds to discard the rest of a body after the response. An immediate close could lose the response, and
# the client could not reuse the connection.
LINGER_S = 5.0
# Seconds between interim responses to a client that has closed its sending side: the first pause, doubled
# each time, and the longest.
CLIENT_TEST_S, MAX_CLIENT_TEST_S = 0.005, 0.5
# Each piece of a body costs some µs, however short it is. The network delivers pieces of a kB or more.
MIN_PIECES, MIN_PIECE_BYTES = 1000, 64
_TINY_CHUNKS = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HEAD_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class Listen:
    """Address of the gateway; port 0 selects a free port. A certificate and its key turn TLS on.

    `grpc_port` is that of the v2 protocol over gRPC, None for none. `keep_alive_s` is the time after which an
    unused connection is closed.
    """

    host: str
    port: int
    grpc_port: int | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None
    keep_alive_s: int = KEEP_ALIVE_S


class BoundedProtocol(HttpToolsProtocol):
    """HTTP with limits that uvicorn lacks: for heads, trailers, tiny pieces, and late heads and bodies."""

    _head_bytes = _pieces = _piece_bytes = 0
    _linger: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit the time of the first head."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait for a head."""
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Limit the time of a further head."""
        super().on_message_begin()
        if self._head_timer is None:
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._end_late_head)

    def _stop_waiting(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_late_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_for_head()  # the request before it still has its response to get
            return
        if self._head_bytes:
            self.transport.write(_HEAD_TOO_LATE)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Read bytes; `MAX_HEAD_BYTES` without a byte of a body end the connection."""
        for start in range(0, len(data), MAX_HEAD_BYTES):
            piece = data[start : start + MAX_HEAD_BYTES]
            self._head_bytes += len(piece)
            super().data_received(piece)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()
            if self.transport.is_closing():
                return

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answer a client that has only closed its sending side; return whether the connection stays open.

        A client that has closed both sides looks the same until it receives something: its system then resets
        the connection, which the next write finds out. Every HTTP client skips `100 Continue`.
        """
        if self.transport.get_extra_info("ssl_object") or not self._is_computing():
            return None
        self.cycle.keep_alive = False
        self._test_client(CLIENT_TEST_S)
        return True

    def _is_computing(self) -> bool:
        return self.cycle is not None and not (self.cycle.more_body or self.cycle.response_started)

    def _test_client(self, pause_s: float) -> None:
        if self._is_computing() and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
            self.loop.call_later(pause_s, self._test_client, min(2 * pause_s, MAX_CLIENT_TEST_S))

    def on_headers_complete(self) -> None:
        """Restart the counts of bytes, and end the wait for the head."""
        self._stop_waiting()
        self._head_bytes = self._pieces = self._piece_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Restart the count of head bytes; many tiny pieces end the connection."""
        self._head_bytes = 0
        if self.transport.is_closing():
            return
        self._pieces += 1
        self._piece_bytes += len(body)
        if self._pieces > MIN_PIECES and self._piece_bytes < self._pieces * MIN_PIECE_BYTES:
            if not self.cycle.response_started:
                self.transport.write(_TINY_CHUNKS)
            self.transport.close()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Restart the count of head bytes, and end the wait for a discarded body."""
        self._head_bytes = 0
        if self._linger:
            self._linger.cancel()
            self._linger = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the rest of the body for a limited time."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._linger = self.loop.call_later(LINGER_S, self.transport.close)


class _UvicornServer(uvicorn.Server):
    """Serve gRPC, too; announce the ports once both listen, and end with status 0 after a signal."""

    gateway: Gateway
    listen: Listen
    announce: Callable[[dict[str, int]], None]
    grpc: GrpcFront | None = None
    failure: OperationFailed | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not (self.started and sockets):
            return
        ports = {"http": sockets[0].getsockname()[1]}
        try:
            if self.listen.grpc_port is not None:
                self.grpc = GrpcFront(self.gateway)
                ports["grpc"] = await self.grpc.start(
                    self.listen.host, self.listen.grpc_port, _grpc_credentials(self.listen)
                )
            self.announce(ports)
        except OperationFailed as error:
            self.failure, self.should_exit = error, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.grpc:
            stopping = asyncio.create_task(self.grpc.stop(STOP_S))
            await super().shutdown(sockets)
            await stopping
        else:
            await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        on_signals(self._stop)  # the second signal ends the process without waiting
        yield

    def _stop(self, number: int) -> None:
        self.should_exit = True


def serve(
    settings: Settings,
    listen: Listen,
    keys: KeyRing,
    source: ModelSource,
    announce: Callable[[dict[str, int]], None],
    logs_requests: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: settings of the gateway.
        listen: address and certificate.
        keys: keys of the callers.
        source: names and routes of the models.
        announce: receives the ports `http` and `grpc` once the gateway listens.
        logs_requests: log each request on stderr, not only failures.

    Raises:
        WrongUsage: the settings are invalid, such as listening beyond loopback without keys.
        OperationFailed: the certificate or the address cannot be used.
    """
    _check_certificate(listen)
    try:
        gateway = create_gateway(settings, keys, source)
    except ValueError as error:
        raise WrongUsage(str(error)) from None
    app = create_app(gateway)
    with _open(listen) as opened:
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            log_config=None,
            log_level="error",  # a line for each damaged request would fill the disk
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=listen.keep_alive_s,
            timeout_graceful_shutdown=STOP_S,
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.certificate_key,
        )
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        if logs_requests:
            logging.getLogger("nereid.gateway").setLevel(logging.INFO)
        # Requests create few reference cycles, and the present objects stay.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_OBJECTS)
        # Each connection is an open file.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        server = _UvicornServer(config)
        server.gateway, server.listen, server.announce = gateway, listen, announce
        server.run([opened])
    if server.failure:
        raise server.failure


def _check_certificate(listen: Listen) -> None:
    if listen.certificate is None:
        if listen.certificate_key:
            raise WrongUsage("--certificate-key needs --certificate")
        return
    for path in filter(None, (listen.certificate, listen.certificate_key)):
        if not (path.is_file() and os.access(path, os.R_OK)):
            raise OperationFailed(f"cannot read '{path}'")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password here, OpenSSL would prompt for one on the terminal.
        context.load_cert_chain(listen.certificate, listen.certificate_key, password="")
    except ssl.SSLError as error:
        where = f"'{listen.certificate}' and '{listen.certificate_key or listen.certificate}'"
        raise OperationFailed(
            f"{where}: expected a certificate and its key (PEM, no password), got: {error.reason}"
        ) from None


def _grpc_credentials(listen: Listen) -> tuple[bytes, bytes] | None:
    """Return the certificate and its key as PEM."""
    if listen.certificate is None:
        return None
    certificate = listen.certificate.read_bytes()
    return certificate, listen.certificate_key.read_bytes() if listen.certificate_key else certificate


def _open(listen: Listen) -> socket.socket:
    opened = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind(address)
    except (OSError, UnicodeError) as error:
        if opened:
            opened.close()
        reason = error.strerror if isinstance(error, OSError) else "unknown host name"
        raise OperationFailed(f"cannot listen on {listen.host} port {listen.port}: {reason}") from None
    return opened

"""The gateway's HTTP server, which runs in the foreground until a signal arrives."""

import asyncio
import contextlib
import gc
import logging
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvicorn

from nereid.base.errors import OperationFailed, WrongUsage
from nereid.base.processes import keep_little_memory, on_signals, raise_open_file_limit
from nereid.gateway.http.app import create_app, create_gateway
from nereid.gateway.http.bounded_protocol import BoundedProtocol
from nereid.gateway.http.middleware import access_log
from nereid.gateway.keys import KeyRing
from nereid.gateway.models import ModelSource
from nereid.gateway.settings import GatewayOptions
from nereid.gateway.state import Gateway
from nereid.gateway.tls import TlsListener, check_certificate, http2_context
from nereid.gateway.v2.grpc_server import GrpcServer
from nereid.gateway.workers import REPORT_INTERVAL_S, SharedState, WorkerPool

log = logging.getLogger("nereid.gateway")
# Seconds that requests in flight have to finish after a signal before their connections are closed.
STOP_TIMEOUT_S = 30
# New objects before a garbage collection; Python's default of 700 amounts to only a few requests.
GC_OBJECTS = 50_000


class _UvicornServer(uvicorn.Server):
    """Serve gRPC too; announce the ports once both are listening, and exit with status 0 after a signal."""

    gateway: Gateway
    options: GatewayOptions
    announce: Callable[[dict[str, int]], object]
    grpc: GrpcServer | None = None
    failure: OperationFailed | None = None
    reporting: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        context, self.config.ssl = self.config.ssl, None
        await super().startup([] if context else sockets)
        if not (self.started and sockets):
            return
        if context:
            protocol = partial(BoundedProtocol, self.config, self.server_state, self.lifespan.state)
            self.servers = [TlsListener(sockets[0], context, protocol)]  # type: ignore[list-item]
        ports = {"http": sockets[0].getsockname()[1]}
        try:
            options = self.options
            if options.grpc_port is not None:
                opened = self._open_grpc(options.host, options.grpc_port)
                ports["grpc"] = opened.getsockname()[1]
                self.grpc = GrpcServer(self.gateway, options.keep_alive_s)
                pem = options.certificate
                await self.grpc.start(opened, http2_context(pem, options.certificate_key) if pem else None)
            self.announce(ports)
        except OperationFailed as error:
            self.failure, self.should_exit = error, True
        if self.gateway.shared:
            self.reporting = asyncio.create_task(self._report())

    def _open_grpc(self, host: str, port: int) -> socket.socket:
        try:
            return _open(host, port, self.gateway.shared is not None)
        except OperationFailed as error:
            raise OperationFailed(f"{error}; fix: choose another with --grpc-port") from None

    async def _report(self) -> None:
        while True:
            self.gateway.report()
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.reporting:
            self.reporting.cancel()
        if self.grpc:
            stopping = asyncio.create_task(self.grpc.stop(STOP_TIMEOUT_S))
            await super().shutdown(sockets)
            await stopping
        else:
            await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        on_signals(self._stop)  # a second signal terminates the process without waiting
        yield

    def _stop(self, number: int) -> None:
        self.should_exit = True


def serve(
    options: GatewayOptions,
    keys: KeyRing,
    source: ModelSource,
    announce: Callable[[dict[str, int]], None],
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        announce: called with the ports `http` and `grpc` once the gateway is listening.

    Raises:
        WrongUsage: the settings are invalid, such as listening beyond loopback without keys.
        OperationFailed: the certificate or the address cannot be used.
    """
    check_certificate(options)
    try:
        gateway = create_gateway(options, keys, source)
    except ValueError as error:
        raise WrongUsage(str(error)) from None
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if options.logs_requests:
        _log_requests()
    if options.workers == 1:
        _serve_here(gateway, options, announce)
        return
    with _reserved(options) as ports, tempfile.TemporaryDirectory() as folder:
        state = SharedState(0, options.workers, Path(folder))
        same_ports = replace(options, port=ports["http"], grpc_port=ports.get("grpc"))

        def run_worker(number: int, announce_listening: Callable[[], object]) -> None:
            shared = replace(state, number=number)
            try:
                gateway = create_gateway(same_ports, keys, source, shared)
            except ValueError as error:  # for example because the last key was revoked in the meantime
                raise OperationFailed(str(error)) from None
            _serve_here(gateway, same_ports, lambda ports: announce_listening())

        WorkerPool(options.workers, run_worker, log.warning, state.forget).run(lambda: announce(ports))


def _serve_here(
    gateway: Gateway, options: GatewayOptions, announce: Callable[[dict[str, int]], object]
) -> None:
    """Serve in this process."""
    with _open(options.host, options.port, is_shared=gateway.shared is not None) as opened:
        config = uvicorn.Config(
            create_app(gateway),
            http=BoundedProtocol,
            log_config=None,
            log_level="error",  # logging every malformed request would fill the disk
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=options.keep_alive_s,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            ssl_certfile=options.certificate,
            ssl_keyfile=options.certificate_key,
        )
        # Requests create few reference cycles, and the objects that exist now are permanent.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_OBJECTS)
        raise_open_file_limit()  # each connection uses one
        keep_little_memory()
        server = _UvicornServer(config)
        server.gateway, server.options, server.announce = gateway, options, announce
        server.run([opened])
    if server.failure:
        raise server.failure


def _log_requests() -> None:
    """Write the access log to stderr as bare JSON lines, for programs."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_log.addHandler(handler)
    access_log.setLevel(logging.INFO)
    access_log.propagate = False


@contextlib.contextmanager
def _reserved(options: GatewayOptions) -> Iterator[dict[str, int]]:
    """Reserve the ports that all workers will listen on, and yield them.

    The kernel distributes connections only among listening sockets, and the ones held here do not listen.
    """
    with contextlib.ExitStack() as held:

        def reserve(port: int) -> int:
            # A first attempt without sharing detects another program on the port.
            with _open(options.host, port) as opened:
                port = opened.getsockname()[1]
            held.enter_context(_open(options.host, port, is_shared=True))
            return port

        ports = {"http": reserve(options.port)}
        if options.grpc_port is not None:
            ports["grpc"] = reserve(options.grpc_port)
        yield ports


def _open(host: str, port: int, is_shared: bool = False) -> socket.socket:
    opened = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        opened = socket.socket(family, kind)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        opened.bind(address)
    except (OSError, UnicodeError) as error:
        if opened:
            opened.close()
        reason = error.strerror if isinstance(error, OSError) else "unknown host name"
        raise OperationFailed(f"cannot listen on {host} port {port}: {reason}") from None
    return opened

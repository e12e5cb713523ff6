"""TLS connections and certificates. Handshakes are limited, and protocols never see unfinished ones."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path

from nereid.base.errors import OperationFailed, WrongUsage
from nereid.gateway.http.bounded_protocol import HEAD_TIMEOUT_S, peer_of
from nereid.gateway.settings import GatewayOptions

BACKLOG = 1024
# Maximum unfinished handshakes per address and in total. Beyond that, the one with the most loses its oldest.
MAX_OF_PEER, MAX_HANDSHAKES = 64, 1024
# Connections accepted per event loop iteration; seconds before retrying when no file descriptor is left.
MAX_ACCEPTED, FULL_PAUSE_S = 64, 1.0


class TlsListener:
    """Accepts connections on a socket and hands those that complete the handshake in time to a protocol.

    Args:
        protocol: creates the protocol for a connection.
    """

    def __init__(
        self, opened: socket.socket, context: ssl.SSLContext, protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._opened, self._context, self._protocol = opened, context, protocol
        self._loop = asyncio.get_running_loop()
        # By address, oldest first.
        self._handshakes: dict[str, dict[asyncio.Task[object], None]] = {}
        opened.setblocking(False)
        opened.listen(BACKLOG)
        self._listen()

    def _listen(self) -> None:
        if self._opened.fileno() >= 0:
            self._loop.add_reader(self._opened, self._accept)

    def close(self) -> None:
        """Stop accepting connections and abort unfinished handshakes."""
        self._loop.remove_reader(self._opened)
        self._opened.close()
        for tasks in self._handshakes.values():
            for task in tasks:
                task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the last handshake has ended."""
        if tasks := [task for tasks in self._handshakes.values() for task in tasks]:
            await asyncio.wait(tasks)

    def _accept(self) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                connection, address = self._opened.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no file descriptor is left
                self._loop.remove_reader(self._opened)
                self._loop.call_later(FULL_PAUSE_S, self._listen)
                return
            connection.setblocking(False)
            self._begin(connection, peer_of(address))

    def _begin(self, connection: socket.socket, peer: str) -> None:
        shaking = self._loop.connect_accepted_socket(
            self._protocol, connection, ssl=self._context, ssl_handshake_timeout=HEAD_TIMEOUT_S
        )
        task: asyncio.Task[object] = self._loop.create_task(shaking)
        peer_handshakes = self._handshakes.setdefault(peer, {})
        peer_handshakes[task] = None
        task.add_done_callback(partial(self._end, connection, peer))
        if len(peer_handshakes) > MAX_OF_PEER or sum(map(len, self._handshakes.values())) > MAX_HANDSHAKES:
            most = max(self._handshakes.values(), key=len)
            # Stop counting it; otherwise all connections of one loop iteration would cancel the same task.
            oldest = next(iter(most))
            del most[oldest]
            oldest.cancel()

    def _end(self, connection: socket.socket, peer: str, task: "asyncio.Task[object]") -> None:
        peer_handshakes = self._handshakes.get(peer, {})
        peer_handshakes.pop(task, None)
        if not peer_handshakes:
            self._handshakes.pop(peer, None)
        if task.cancelled() or task.exception():  # also marks the client's error as retrieved
            connection.close()


def http2_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """Return a certificate's TLS context for HTTP/2, which gRPC clients negotiate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, password="")
    context.set_alpn_protocols(["h2"])
    return context


def check_certificate(options: GatewayOptions) -> None:
    """Check that a gateway's certificate and key, if any, are usable.

    Raises:
        WrongUsage: a key was given without a certificate.
        OperationFailed: they cannot be read or do not match.
    """
    if options.certificate is None:
        if options.certificate_key:
            raise WrongUsage("--certificate-key needs --certificate")
        return
    for path in filter(None, (options.certificate, options.certificate_key)):
        if not (path.is_file() and os.access(path, os.R_OK)):
            raise OperationFailed(f"cannot read '{path}'")
    try:
        # Without a password here, OpenSSL would prompt for one on the terminal.
        http2_context(options.certificate, options.certificate_key)
    except ssl.SSLError as error:
        where = f"'{options.certificate}' and '{options.certificate_key or options.certificate}'"
        raise OperationFailed(
            f"{where}: expected a certificate and its key (PEM, no password), got: {error.reason}"
        ) from None

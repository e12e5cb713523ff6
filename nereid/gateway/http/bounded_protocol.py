"""HTTP/1.1 for the gateway's connections, with limits on time and size."""

import asyncio
from ipaddress import ip_address
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 * 2**10
# Time limit in seconds for a request's head, from the connection or the head's first byte.
HEAD_TIMEOUT_S = 10.0
# Maximum open connections per address and in total. Beyond that, the oldest idle connection of the address
# with the most connections is closed.
MAX_OF_PEER, MAX_CONNECTIONS = 2048, 8192
# Seconds for discarding the rest of a body after the response. Closing immediately could lose the response
# and would keep the client from reusing the connection.
LINGER_S = 5.0
# Seconds between interim responses to a client that has closed its sending side: the first pause, which is
# doubled each time, and the longest.
CLIENT_TEST_S, MAX_CLIENT_TEST_S = 0.005, 0.5
# Each piece of a body costs a few µs, however short. The network normally delivers pieces of 1 kB or more.
MIN_PIECES, MIN_PIECE_BYTES = 1000, 64
_TINY_CHUNKS = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_HEAD_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_HEAD_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


def peer_of(address: Any) -> str:
    """Return the identity for per-client limits: the IPv4 address or the IPv6 /64 network."""
    if not address:
        return ""
    ip = ip_address(str(address[0]).partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    if ip.version == 6 and mapped is None:
        return str(int(ip) >> 64)
    return str(mapped or ip)


class BoundedProtocol(HttpToolsProtocol):
    """HTTP with limits that uvicorn lacks: on heads, trailers, tiny pieces, and late heads and bodies."""

    _head_bytes = _pieces = _piece_bytes = 0
    _closes_after_body = False
    _linger: asyncio.TimerHandle | None = None
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Limit the time for the first head, and the number of connections."""
        super().connection_made(transport)
        self._wait_for_head()
        self._peer = peer_of(self.client)
        peer_connections = _OPEN.setdefault(self._peer, {})
        peer_connections[self] = None
        if len(peer_connections) > MAX_OF_PEER or sum(map(len, _OPEN.values())) > MAX_CONNECTIONS:
            most = max(_OPEN.values(), key=len)
            victim = next((connection for connection in most if connection._is_idle()), self)
            victim._forget()
            victim.transport.close()

    def _is_idle(self) -> bool:
        return self.cycle is None or bool(self.cycle.response_complete)

    def _forget(self) -> None:
        peer_connections = _OPEN.get(self._peer, {})
        peer_connections.pop(self, None)
        if not peer_connections:
            _OPEN.pop(self._peer, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting for a head."""
        self._stop_waiting()
        self._forget()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Limit the time for each further head."""
        super().on_message_begin()
        if self._head_timer is None:
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._end_late_head)

    def _stop_waiting(self) -> None:
        if self._head_timer:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_late_head(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._wait_for_head()  # the previous request is still awaiting its response
            return
        if self._head_bytes:
            self.transport.write(_HEAD_TOO_LATE)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Read bytes; close the connection after `MAX_HEAD_BYTES` without a byte of a body."""
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

        A client that has closed both sides looks the same until something is sent to it. Its system then
        resets the connection, which the next write detects. Every HTTP client skips `100 Continue`.
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
        """Reset the byte counts and stop waiting for the head."""
        self._stop_waiting()
        self._head_bytes = self._pieces = self._piece_bytes = 0
        before = self.cycle
        super().on_headers_complete()
        self.headers = []  # a new list, so that trailers, which a proxy may not have checked, are dropped
        if self.cycle is not before:  # an upgrade to another protocol creates none
            self._closes_after_body = False
            self.cycle.transport = _TransportOfRequest(self, self.cycle)  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Reset the count of head bytes; close the connection after too many tiny pieces."""
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
        """Reset the count of head bytes and stop waiting for a discarded body."""
        self._head_bytes = 0
        if self._linger:
            self._linger.cancel()
            self._linger = None
        super().on_message_complete()
        if self._closes_after_body:
            self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for the rest of the body for a limited time."""
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body:
            self._linger = self.loop.call_later(LINGER_S, self.transport.close)


# The connections of this process by address, oldest first.
_OPEN: dict[str, dict[BoundedProtocol, None]] = {}


class _TransportOfRequest:
    """The transport as a request sees it; after the response, it closes only once the body is discarded."""

    def __init__(self, protocol: BoundedProtocol, cycle: RequestResponseCycle) -> None:
        self._protocol, self._cycle = protocol, cycle
        self.write, self.is_closing = protocol.transport.write, protocol.transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._protocol.transport, name)

    def close(self) -> None:
        if self._cycle.response_complete and self._cycle.more_body:
            self._protocol._closes_after_body = True
        else:
            self._protocol.transport.close()

"""Server addresses: HOST:PORT, or `unix:PATH` for a Unix domain socket."""

import http.client
import socket

UNIX = "unix:"


def unix_path(url: str) -> str:
    """Return the path in `unix:PATH`; empty for HOST:PORT."""
    return url.removeprefix(UNIX) if url.startswith(UNIX) else ""


def open_http(url: str, timeout_s: float) -> http.client.HTTPConnection:
    """Return an HTTP connection to an address; it connects on the first request."""
    if path := unix_path(url):
        return _UnixConnection(path, timeout_s)
    return http.client.HTTPConnection(url, timeout=timeout_s)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)

"""The background load reports each request, and its own errors."""

import socket
import threading
import time
from contextlib import closing

import pytest

from loadtest.background_load import BackgroundLoad
from tests.routes import wait_until


class At:
    """An address on this machine, or none."""

    def __init__(self, port: int | None) -> None:
        self._port = port

    def url(self, protocol: str) -> str:
        if self._port is None:
            raise LookupError(f"no {protocol}")
        return f"127.0.0.1:{self._port}"


def test_failed_requests_are_reported():
    with BackgroundLoad(At(1), "classify", 2, pause_s=0.01, timeout_s=0.2) as load:
        wait_until(lambda: len(load.requests) >= 4)

    assert all(each.failure for each in load.requests)
    assert all(0 <= each.end_s - each.begin_s < 10 for each in load.requests)
    assert all(each.end_s <= time.monotonic() for each in load.requests)


def test_oldest_request_in_flight_is_known():
    began_s = time.monotonic()
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        with BackgroundLoad(At(port), "classify", 1, timeout_s=0.5) as load:
            wait_until(lambda: began_s < load.waits_since_s() < time.monotonic() - 0.1)

    assert load.waits_since_s() >= load.requests[-1].end_s


def test_error_of_a_caller_ends_the_context():
    """A load that never started must not look like a load without failures."""
    with pytest.raises(LookupError, match="no http"), BackgroundLoad(At(None), "classify", 1):
        wait_until(lambda: "background load" not in {each.name for each in threading.enumerate()})

"""The background load reports each request, and its own errors."""

import threading
import time

import pytest

from loadtest.background_load import BackgroundLoad
from tests.routes import wait_until


class Nowhere:
    """An address without a server."""

    def url(self, protocol: str) -> str:
        """Return it."""
        return "127.0.0.1:1"


class Broken:
    """A server without an address."""

    def url(self, protocol: str) -> str:
        """Fail."""
        raise LookupError(f"no {protocol}")


def test_failed_requests_are_reported():
    """Callers of both protocols go on after failures, within their timeout."""
    with BackgroundLoad(Nowhere(), "classify", 2, pause_s=0.01, timeout_s=0.2) as load:
        wait_until(lambda: len(load.requests) >= 4)

    assert all(each.failure for each in load.requests)
    assert all(0 <= each.end_s - each.begin_s < 10 for each in load.requests)
    assert all(each.end_s <= time.monotonic() for each in load.requests)


def test_error_of_a_caller_ends_the_context():
    """A load that never started must not look like a load without failures."""
    with pytest.raises(LookupError, match="no http"), BackgroundLoad(Broken(), "classify", 1):
        wait_until(lambda: "background load" not in {each.name for each in threading.enumerate()})

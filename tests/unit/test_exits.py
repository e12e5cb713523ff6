"""Waiting for the end of processes."""

import subprocess
import threading
import time

import pytest

from nereid.server.supervision.exits import Exits

WATCHDOG_S = 60.0


@pytest.fixture
def exits():
    exits = Exits()
    yield exits
    exits.close()


@pytest.fixture
def process():
    with subprocess.Popen(["sleep", str(WATCHDOG_S)]) as process:
        yield process
        process.kill()


def test_end_of_a_process_ends_the_wait(exits, process):
    """Also if it is gone before the wait; one that is no longer named does not."""
    threading.Timer(0.2, process.kill).start()
    began_s = time.monotonic()
    exits.wait({process.pid}, WATCHDOG_S)
    assert process.wait() != 0
    ended_s = time.monotonic()
    exits.wait((), 0.2)
    assert time.monotonic() - ended_s >= 0.2
    exits.wait({process.pid}, WATCHDOG_S)

    assert time.monotonic() - began_s < WATCHDOG_S


@pytest.mark.parametrize("when", ["before", "during"])
def test_interruption_ends_one_wait(exits, process, when):
    if when == "before":
        exits.interrupt()
    else:
        threading.Timer(0.2, exits.interrupt).start()
    began_s = time.monotonic()
    exits.wait({process.pid}, WATCHDOG_S)
    assert time.monotonic() - began_s < WATCHDOG_S

    again_s = time.monotonic()
    exits.wait({process.pid}, 0.2)
    assert time.monotonic() - again_s >= 0.2


def test_kernel_that_cannot_watch_is_asked_often(exits, process, monkeypatch):
    """Linux before 5.3 and some sandboxes have no such file; then the wait ends soon."""

    def refuse(pid):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("os.pidfd_open", refuse)
    began_s = time.monotonic()
    exits.wait({process.pid}, WATCHDOG_S)

    assert time.monotonic() - began_s < WATCHDOG_S

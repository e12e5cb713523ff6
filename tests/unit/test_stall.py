"""A server that is made to stand still now and then."""

import subprocess
import sys
import time

import psutil
import pytest

from loadtest import stall
from tests.routes import wait_until


def test_a_process_is_stopped_and_runs_again():
    """Also if the context ends amid a stall."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        with stall.stalls(child.pid, stall.STALL_S):
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED)

        assert process.status() != psutil.STATUS_STOPPED
        child.kill()


def test_a_process_that_has_ended_is_told():
    """Else a run that was not stalled would pass for one that was."""
    child = subprocess.Popen(["true"])
    child.wait()

    with pytest.raises(psutil.NoSuchProcess), stall.stalls(child.pid, stall.STALL_S):
        time.sleep(1)  # until the first stall, which is due at once

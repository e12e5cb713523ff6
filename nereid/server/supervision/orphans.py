"""Servers whose supervisor was killed: the next start waits until all their processes have ended."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from nereid.backends.triton import stub_processes
from nereid.server import run_dir
from nereid.server.embedded_server import STOP_TIMEOUT_S

# Time that killed processes need to end.
KILLED_S = 10.0


def wait_for_end(base: Path, repository: Path, log: Callable[[str], None]) -> None:
    """Wait until servers of the repository whose supervisor was killed have answered their last requests.

    They end by themselves then, and still have their ports until that. One that hangs is killed. A server
    that waits for an idle connection ends without its stubs, which end a moment later.
    """
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for pid, folder in run_dir.orphans(base, repository):
        log(f"waiting for the server with pid {pid}, whose supervisor was killed, to end")
        stubs = [stub.process for stub in stub_processes.find(pid, repository)]
        while _is_alive(pid, folder, stubs) and time.monotonic() < deadline + KILLED_S:
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # with its stubs
            time.sleep(0.1)


def _is_alive(pid: int, folder: Path, stubs: list[stub_processes.Process]) -> bool:
    if run_dir.is_server_of(pid, folder):
        return True
    left = stub_processes.states(stubs).values()
    return any(letter != stub_processes.ZOMBIE for letter in left)

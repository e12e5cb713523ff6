"""Sockets that a stub process inherits from the server that starts it."""

import contextlib
import os
import socket
import stat
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")


def close_connections() -> None:
    """Close the inherited connections of clients.

    Triton 24.10 passes the HTTP connections that are open at the start of a stub on to it. A connection that
    the server closes then stays open as long as the stub lives: its client waits for the end in vain, and the
    kernel keeps its buffers. Call this function before the process opens its own connections.
    """
    for number in [int(each.name) for each in DESCRIPTORS.iterdir()]:
        with contextlib.suppress(OSError):  # the descriptor with which the folder was read
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                inherited = socket.socket(fileno=number)
                if inherited.family in (socket.AF_INET, socket.AF_INET6):
                    inherited.close()
                else:
                    inherited.detach()

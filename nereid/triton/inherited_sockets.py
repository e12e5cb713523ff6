"""What a stub process takes over from the server that starts it, and has no use for."""

import contextlib
import os
import socket
import stat
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")


def close_connections() -> None:
    """Close the callers' connections that were open when this process was started.

    Triton 24.10 hands those over HTTP on to every stub. For as long as that lives, one that the server closes
    is not closed: a caller that waits for its end waits in vain, and the kernel keeps its buffers. To be
    called before anything opens a connection of its own.
    """
    for number in [int(each.name) for each in DESCRIPTORS.iterdir()]:
        with contextlib.suppress(OSError):  # the descriptor with which the folder was read
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                inherited = socket.socket(fileno=number)
                if inherited.family in (socket.AF_INET, socket.AF_INET6):
                    inherited.close()
                else:
                    inherited.detach()

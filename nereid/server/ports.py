"""TCP ports of a server: finding free ones, checking chosen ones, and the buffers of listening ones."""

import contextlib
import os
import random
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from nereid.base.errors import ServerError

# The kernel's range of ports for outgoing connections.
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
MIN_PORT, MAX_TRIES = 10_000, 64
# State of a listening socket. Source: the kernel's include/net/tcp_states.h.
LISTEN = "0A"
# Number of the system call on all processors. The kernel limits the bytes to net.core.rmem_max.
PIDFD_GETFD, RECEIVE_BYTES = 438, 2**20


@dataclass(frozen=True, slots=True)
class Ports:
    """The TCP ports of one server."""

    http: int
    grpc: int
    metrics: int


def free_ports(count: int) -> list[int]:
    """Return distinct free ports, which stay reserved until this process ends.

    A reserved port is not found again, even by another process, but a server that sets `SO_REUSEADDR`, as all
    servers here do, can listen on it. Ports outside the range of outgoing connections come first, because no
    such connection can take them.
    """
    first_outgoing = int(OUTGOING_PORTS.read_text().split()[0])
    below = range(min(MIN_PORT, first_outgoing), first_outgoing)
    candidates = [*random.SystemRandom().sample(below, min(len(below), MAX_TRIES)), *[0] * count]
    ports: list[int] = []
    for port in candidates:
        holder = socket.socket()
        try:
            holder.bind(("", port))
        except OSError:
            holder.close()
            continue
        # After the search, which must not find the reserved ports of others.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ports.append(holder.getsockname()[1])
        holder.detach()  # open until the process ends
        if len(ports) == count:
            break
    return ports


def why_unusable(host: str, port: int) -> str | None:
    """Return why nothing can listen on `host` and `port`, or None if something can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def unusable_port(name: str, host: str, port: int, reason: str) -> ServerError:
    """Build the error for a port that cannot be used, with the option that chooses another."""
    return ServerError(
        f"{name} port {port} on {host} cannot be used: {reason}",
        f"choose another with --{name}-port, 0 for any free one, or another --host",
    )


def is_listening(pid: int, port: int) -> bool:
    """Return whether a process of this user listens on a TCP port."""
    return bool(_listeners(pid, port))


def widen_receive_buffers(pid: int, port: int) -> bool:
    """Enlarge the receive buffers of the connections that a child process will accept on a TCP port.

    Triton's HTTP port reads 4 kB at a time, so the kernel's first receive window of 64 kB fills up. About
    every tenth larger request then waits 7 ms for a kernel timer. A fixed buffer prevents this. The window no
    longer grows for distant clients, so use it for a port that only this machine reaches.

    Returns:
        Whether it was possible: Linux before 5.6 does not support it, and some sandboxes forbid it.
    """
    import ctypes

    is_done = False
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            for number in _listeners(pid, port):
                copy = ctypes.CDLL(None).syscall(PIDFD_GETFD, process, number, 0)
                if copy >= 0:
                    with socket.socket(fileno=copy) as listener:
                        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
                    is_done = True
        finally:
            os.close(process)
    return is_done


def _listeners(pid: int, port: int) -> list[int]:
    """Return the descriptors on which a process of this user listens on a TCP port."""
    process, descriptors = Path("/proc") / str(pid), list[int]()
    with contextlib.suppress(OSError):  # it has exited
        rows = [
            row.split()
            for name in ("tcp", "tcp6")
            if (process / "net" / name).exists()
            for row in (process / "net" / name).read_text().splitlines()[1:]
        ]
        inodes = {row[9] for row in rows if row[3] == LISTEN and int(row[1].rpartition(":")[2], 16) == port}
        sockets = {f"socket:[{inode}]" for inode in inodes}
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed
                if str(descriptor.readlink()) in sockets:
                    descriptors.append(int(descriptor.name))
    return descriptors


def check_ports(host: str, ports: Ports) -> None:
    """Check that a server can listen on its ports.

    Raises:
        ServerError: a port is taken, or the host is not an address of this machine.
    """
    for name, port in asdict(ports).items():
        if reason := why_unusable(host, port):
            raise unusable_port(name, host, port, reason)


def wait_until_free(host: str, ports: Ports, timeout_s: float) -> None:
    """Wait until ports are free; if they stay taken, the next start reports it."""
    deadline = time.monotonic() + timeout_s
    while any(why_unusable(host, port) for port in asdict(ports).values()) and time.monotonic() < deadline:
        time.sleep(0.1)

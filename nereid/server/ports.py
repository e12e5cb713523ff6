"""TCP ports of a server: finding free ones, and checking chosen ones."""

import contextlib
import random
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from nereid.errors import ServerError

# The kernel's range of ports for outgoing connections.
OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
MIN_PORT, MAX_TRIES = 10_000, 64
# State of a listening socket. Source: the kernel's include/net/tcp_states.h.
LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Ports:
    """The TCP ports of one server."""

    http: int
    grpc: int
    metrics: int


def free_ports(count: int) -> list[int]:
    """Return distinct ports that were free a moment ago.

    Ports outside the range of outgoing connections come first: no such connection can take them.
    """
    first_outgoing = int(OUTGOING_PORTS.read_text().split()[0])
    below = range(min(MIN_PORT, first_outgoing), first_outgoing)
    candidates = [*random.SystemRandom().sample(below, min(len(below), MAX_TRIES)), *[0] * count]
    found: list[int] = []
    with contextlib.ExitStack() as stack:  # all stay open until the last is known, so that they differ
        for port in candidates:
            holder = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                holder.bind(("", port))
                found.append(holder.getsockname()[1])
            if len(found) == count:
                break
    return found


def why_unusable(host: str, port: int) -> str | None:
    """Return the reason why nothing can listen on `host` and `port`, or None if that is possible."""
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
    process = Path("/proc") / str(pid)
    with contextlib.suppress(OSError):  # it has ended
        rows = [
            row.split()
            for name in ("tcp", "tcp6")
            if (process / "net" / name).exists()
            for row in (process / "net" / name).read_text().splitlines()[1:]
        ]
        inodes = {row[9] for row in rows if row[3] == LISTEN and int(row[1].rpartition(":")[2], 16) == port}
        opened = {str(each.readlink()) for each in (process / "fd").iterdir()}
        return any(f"socket:[{inode}]" in opened for inode in inodes)
    return False


def check_ports(host: str, ports: Ports) -> None:
    """Check that a server can listen on its ports.

    Raises:
        ServerError: one is taken, or the host is not an address of this machine.
    """
    for name, port in asdict(ports).items():
        if reason := why_unusable(host, port):
            raise unusable_port(name, host, port, reason)

"""TCP ports of a server: free ones, and the message for one that cannot be used."""

import os
import socket
from pathlib import Path

import pytest

from nereid.base.errors import ServerError
from nereid.server import ports
from nereid.server.ports import Ports, check_ports, free_ports


def test_taken_port_is_named_with_its_option():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with pytest.raises(ServerError, match=f"http port {port} on 127.0.0.1 cannot be used: .*--http-port"):
            check_ports("127.0.0.1", Ports(port, 0, 0))


def test_free_ports_are_not_those_of_outgoing_connections(tmp_path, monkeypatch):
    """Outgoing connections could take such a port first; they are used only if no other is free."""
    range_file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "OUTGOING_PORTS", range_file)
    range_file.write_text("12000\t60999\n")
    below = free_ports(3)
    range_file.write_text("1024\t65535\n")
    any_at_all = free_ports(3)

    assert all(10_000 <= port < 12_000 for port in below)
    assert len(set(below)) == len(set(any_at_all)) == 3


def test_found_port_is_for_its_finder_only(tmp_path, monkeypatch):
    """No other process finds it, or can take it by chance; a server of ours listens on it, more than once."""
    range_file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(ports, "OUTGOING_PORTS", range_file)
    range_file.write_text("32768\t60999\n")
    (port,) = free_ports(1)
    range_file.write_text(f"{port + 1}\t{port + 1}\n")
    monkeypatch.setattr(ports, "MIN_PORT", port)

    others = free_ports(1)

    assert others != [port]
    with socket.socket() as by_chance, pytest.raises(OSError, match="in use"):
        by_chance.bind(("127.0.0.1", port))
    for _ in range(2):
        check_ports("127.0.0.1", Ports(port, port, port))
        with socket.create_server(("127.0.0.1", port)), pytest.raises(ServerError, match="in use"):
            check_ports("127.0.0.1", Ports(port, port, port))


def test_later_connections_get_a_wide_receive_buffer():
    """The next connection has as much as the kernel allows; a port without a listener changes nothing."""
    largest = int(Path("/proc/sys/net/core/rmem_max").read_text())
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()

        def accepted_bytes() -> int:
            with socket.create_connection(address), server.accept()[0] as connection:
                return connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

        before = accepted_bytes()
        assert ports.widen_receive_buffers(os.getpid(), address[1])
        assert accepted_bytes() == 2 * min(ports.RECEIVE_BYTES, largest) != before
    assert not ports.widen_receive_buffers(os.getpid(), address[1])

"""TCP ports of a server: free ones, and the message for one that cannot be used."""

import socket

import pytest

from nereid.errors import ServerError
from nereid.server import ports
from nereid.server.ports import Ports, check_ports, free_ports


def test_taken_port_is_named_with_its_option():
    """The message has the port, its use, and the option that chooses another."""
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

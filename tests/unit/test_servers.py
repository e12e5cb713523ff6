"""Commands that a measurement starts: the message if one does not start, and the end of each."""

import os
import subprocess

import pytest

from loadtest import servers
from nereid.assets import REPOSITORY


def test_server_that_does_not_start_is_reported_with_its_log(tmp_path):
    """The reason is in the log, which is shown nowhere else."""
    with (
        pytest.raises(SystemExit, match=r"(?s)nereid serve did not start:.*nobody"),
        servers.supervised(REPOSITORY, tmp_path, os.environ, ["--profile", "nobody"]),
    ):
        pass


def test_gateway_that_does_not_start_is_reported():
    with pytest.raises(SystemExit, match=r"nereid gateway did not start$"), servers.gateway(-1):
        pass


def test_command_that_does_not_stop_is_killed(monkeypatch):
    """A measurement waits for the end only for a limited time."""
    monkeypatch.setattr(servers, "END_S", 0.2)
    stubborn = subprocess.Popen(
        ["sh", "-c", "trap '' TERM; echo; while :; do sleep 0.1; done"], stdout=subprocess.PIPE
    )
    assert stubborn.stdout
    stubborn.stdout.readline()

    servers._end(stubborn)

    assert stubborn.returncode == -9

"""Models are loaded and unloaded on the real server while it serves requests."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from nereid.server.command_line import region_prefix
from tests.networks import assert_same, connect, infer, serve
from tests.routes import NETWORK, X, adding, store_adding

# A watchdog, far longer than a load takes.
LOAD_S = 60
# After a failed reload this core waits at its exit for a model that never ends, with any backend.
STOP_SOON = "--exit-timeout-secs=3"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("run"), STOP_SOON) as running:
        yield running


@pytest.fixture
def client(server):
    with connect(server) as opened:
        yield opened


def publish(server, name: str, *numbers: int, config: str = NETWORK) -> Path:
    store_adding(server.options.repository, name, *numbers, config=config)
    return server.options.repository / name


def added(server, name: str, version: str = "") -> int:
    response = infer(server, name, {"x": X}, model_version=version)
    number = response["scores"][0, 0] - X[0, 0]
    assert_same(response, {"scores": X + number})
    return int(number)


def test_stub_of_a_later_load_keeps_no_connection_open(server, client):
    """A new stub inherits the clients' connections; when the server closes one, it must end."""
    publish(server, "late", 1)
    with socket.create_connection(("127.0.0.1", server.options.ports.http), LOAD_S) as caller:
        caller.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert caller.recv(2**12).startswith(b"HTTP/1.1 200 ")

        client.load_model("late")
        caller.shutdown(socket.SHUT_WR)

        assert caller.recv(1) == b""


def test_killed_server_leaves_no_shared_memory(tmp_path):
    """Killed stubs cannot remove their shared memory; the end of the server removes it."""
    (tmp_path / "models").mkdir()
    (tmp_path / "run").mkdir()
    with serve(tmp_path / "models", tmp_path / "run") as running, connect(running) as client:
        publish(running, "short_lived", 1)
        client.load_model("short_lived")
        pattern = f"{region_prefix(running.id)}*"
        assert [*Path("/dev/shm").glob(pattern)]

        os.killpg(running.pid, signal.SIGKILL)

    assert not [*Path("/dev/shm").glob(pattern)]


def test_load_request_may_have_a_network(server, client):
    publish(server, "carried", 1)
    content = adding(5).SerializeToString()
    # The rest is completed from the file.
    config = {"backend": "onnxruntime", "instance_group": [{"kind": "KIND_CPU", "count": 1}]}

    client.load_model("carried", config=json.dumps(config), files={"file:7/model.onnx": content})

    assert client.get_model_config("carried").config.max_batch_size == 4
    assert added(server, "carried") == 5
    assert client.is_model_ready("carried", "7")
    assert not client.is_model_ready("carried", "1")

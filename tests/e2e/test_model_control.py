"""Models are loaded and unloaded on the real server while it serves requests."""

import itertools
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import onnx
import pytest
from tritonclient.utils import InferenceServerException

from nereid.base.processes import in_background
from tests.networks import connect, serve
from tests.publishing import added
from tests.routes import NETWORK, adding, store_adding, wait_until
from tests.tables import cases

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


def touch(path: Path) -> None:
    """Make a file newer, so that Triton notices a change."""
    later = time.time_ns() + 5 * 10**9
    os.utime(path, ns=(later, later))


def test_old_network_answers_while_the_new_one_loads(server, client):
    path = publish(server, "busy", 1) / "1" / "model.onnx"
    client.load_model("busy")
    seen, failures = [], []

    def keep_sending(done: threading.Event) -> None:
        try:
            while not done.is_set():
                seen.append(added(server, "busy"))
        except Exception as error:
            failures.append(error)

    with in_background("sending", keep_sending, LOAD_S):
        wait_until(lambda: seen or failures)
        onnx.save(adding(2), path)
        touch(path)
        client.load_model("busy")
        answered = len(seen)
        wait_until(lambda: len(seen) > answered + 1 or failures)

    assert failures == []
    assert [number for number, _ in itertools.groupby(seen)] == [1, 2]


@cases(
    network=("1/model.onnx", "not a protobuf"),
    config=("config.pbtxt", NETWORK.replace('"x"', '"z"')),
)
def test_failed_reload_leaves_the_old_network_serving(broken, content, server, client, request):
    name = f"kept_{request.node.callspec.id}"
    folder = publish(server, name, 1)
    client.load_model(name)
    path = folder / broken
    path.write_text(content)
    touch(path)

    with pytest.raises(InferenceServerException, match=f"load failed for model '{name}'"):
        client.load_model(name)

    assert client.is_model_ready(name)
    assert added(server, name) == 1


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
        pattern = f"{running.id}-*"
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

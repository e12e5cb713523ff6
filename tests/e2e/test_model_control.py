"""Models are loaded and unloaded on the real server while it serves; refusals are in NVIDIA's words.

Of the refusals, tests/unit/test_onnx_file.py and tests/unit/test_session_options.py have all.
"""

import itertools
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import onnx
import pytest
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from nereid.base.processes import in_background
from tests.networks import ONE_INSTANCE, connect, identity, serve, store, tensor
from tests.publishing import added
from tests.routes import NETWORK, adding, store_adding, wait_until
from tests.tables import cases

# A watchdog, far longer than a load takes.
LOAD_S = 60
# After a failed reload this core waits at its exit for a model that never ends, with any backend.
STOP_SOON = "--exit-timeout-secs=3"
ROWS = identity("FP32", ["batch", 4])


@pytest.fixture(scope="module")
def log() -> list[str]:
    return []


@pytest.fixture(scope="module")
def server(tmp_path_factory, log):
    models, run = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("run")
    with serve(models, run, STOP_SOON, log=log.append) as running:
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


def check_refused(client, log: list[str], name: str, message: str) -> None:
    """Load a stored model; client and log must have the reason, in the log as its first line."""
    with pytest.raises(InferenceServerException) as refused:
        client.load_model(name)

    pattern = rf"failed to load '{name}' version 1: (.*?)(\\n|\"?$)"
    assert message in refused.value.message()
    texts = wait_until(lambda: [hit[1] for line in [*log] if (hit := re.search(pattern, line))], "the log")
    assert message in texts[0].replace('\\"', '"')


def test_bad_config_is_refused_in_the_words_of_nvidia(server, client, log):
    """NVIDIA's backend prints the datatype of the wire behind TYPE_."""
    tensors = tensor("input", "x", "FP32", [4]) + tensor("output", "y", "FP32", [4])
    config = f"{ONE_INSTANCE}max_batch_size: 4\n{tensors}"
    store(server.options.repository, "datatype", identity("STRING", ["batch", 4]), config)
    said = "configuration expects datatype TYPE_FP32 for input 'x', model provides TYPE_BYTES"

    check_refused(client, log, "datatype", f"unable to load model 'datatype', {said}")


def test_network_that_cannot_be_read_is_named_by_its_path(server, client, log):
    """`model.onnx` is a folder without the file, or damaged, which ONNX Runtime says in its own words."""
    config = ONE_INSTANCE + 'backend: "onnxruntime"\n'
    missing, broken = (store(server.options.repository, name, ROWS, config) for name in ("missing", "broken"))
    broken.write_bytes(b"no protobuf")
    missing.unlink()
    missing.mkdir()

    check_refused(client, log, "broken", f"onnx runtime error 7: Load model from {broken} failed")
    check_refused(
        client, log, "missing", f"unable to find '{missing / 'model.onnx'}' for model instance 'missing'"
    )


def test_config_is_completed_from_the_network(server, client, log):
    store(server.options.repository, "bare", ROWS, None)
    client.load_model("bare")
    config = client.get_model_config("bare").config

    described = [(entry.name, entry.data_type, list(entry.dims)) for entry in (*config.input, *config.output)]
    assert described == [(name, model_config_pb2.TYPE_FP32, [4]) for name in ("x", "y")]
    assert (config.max_batch_size, list(config.dynamic_batching.preferred_batch_size)) == (4, [4])
    message = "autofilled max_batch_size to 4 for model 'bare' since batching is supporrted but no "
    message += "max_batch_size is specified in model configuration. Must specify max_batch_size to "
    message += "utilize autofill with a larger max batch size"
    warnings = wait_until(lambda: [line for line in [*log] if message in line], "the warning")
    assert warnings[0].startswith("W")

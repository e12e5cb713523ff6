"""A guarded server: the v2 protocol through the gateway, while Triton itself has no port."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http

from loadtest import resource_usage
from loadtest.attack.attacks import ATTACKS, Front
from loadtest.attack.costly import COSTLY
from loadtest.attack.fuzz import fuzz
from loadtest.torture.traffic import Traffic, classifiers
from nereid.base.addresses import unix_path
from nereid.base.assets import CHELSEA, COFFEE, REPOSITORY
from nereid.client.client_errors import Overloaded
from nereid.gateway import key_changes
from nereid.server import run_dir
from nereid.server.ports import is_listening
from nereid.tasks.classify.client import Classifier
from tests.classifiers import check_bytes_are_sent, opened
from tests.commands import captured
from tests.e2e.conftest import ESPRESSO, metric
from tests.networks import CLIENTS, Arrays, arrays_of, assert_same, client_input
from tests.pictures import encode
from tests.proof import REQUESTS
from tests.routes import WATCHDOG_S, wait_until
from tests.supervised import Served, image_input, serving
from tests.tables import cases

NETWORK = "efficientnet_lite0"


@dataclass(frozen=True, slots=True)
class Guarded:
    served: Served
    keys: Path
    key: str

    def url(self, protocol: str) -> str:
        return f"127.0.0.1:{self.served.ports[protocol]}"

    @property
    def front(self) -> Front:
        return Front(self.served.ports["http"], self.served.ports["grpc"], self.key)

    @property
    def pid(self) -> int:
        return self.served.server_info.pid


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys.json"
    secret = key_changes.add(keys, "attacker", ["infer"], None)
    words = ("--guard", "--keys", str(keys), "--", f"--load-model={NETWORK}")
    with serving(REPOSITORY, folder / "run", *words) as served:
        yield Guarded(served, keys, secret)


def infer(url: str, protocol: str, model: str, tensor, outputs=(), **options) -> Arrays:
    requested = [CLIENTS[protocol].InferRequestedOutput(*output) for output in outputs] or None
    with CLIENTS[protocol].InferenceServerClient(url) as client:
        arrays = arrays_of(client.infer(model, [tensor], outputs=requested, **options))
    # JSON has texts instead of bytes.
    as_bytes = np.vectorize(lambda text: text.encode() if isinstance(text, str) else text, "O")
    return {name: as_bytes(array) if array.dtype == object else array for name, array in arrays.items()}


def test_triton_has_no_port(guarded):
    folder = Path(guarded.served.server_info.sockets)

    assert not any(is_listening(guarded.pid, port) for port in guarded.served.ports.values())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.name for file in folder.iterdir()} == {"http.sock", "grpc.sock:8001", "metrics.sock"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_users_do_not_reach_triton(guarded):
    code = "import os, socket, sys; os.setuid(65534); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    path = unix_path(guarded.served.server_info.url("http"))

    done = captured([sys.executable, "-c", code, path], timeout=WATCHDOG_S)

    assert "PermissionError" in done.stderr


def test_attacks_are_rejected_and_do_not_disturb_others(guarded):
    pid = guarded.pid

    callers = classifiers(guarded.url, "classify", 2, 8)
    with Traffic(callers) as traffic:
        statuses = {attack.name: attack.send(guarded.front) for attack in ATTACKS}

    # Beside other work on the machine, a costly file may take longer than the route's deadline.
    late = {name for name in COSTLY if statuses[name] == "504"}
    wrong = {case.name: statuses[case.name] for case in ATTACKS if statuses[case.name] not in case.expected}
    assert wrong.keys() <= late, wrong
    assert traffic.sent > 5
    assert traffic.faults() == []
    assert guarded.pid == pid


@cases(
    "outputs",
    all=[],
    chosen=[("scores",), ("variant",)],
    classes=[("scores", True, 3), ("route_reason",)],
    as_JSON=[("scores", False), ("version", False)],
)
@pytest.mark.parametrize("photos", [(COFFEE,), (COFFEE, CHELSEA)], ids=["one", "batch"])
def test_answers_are_tritons_own(guarded, protocol, outputs, photos):
    if protocol == "grpc":  # which has no JSON
        outputs = [(name, *rest[1:]) for name, *rest in outputs]
    options = {"outputs": outputs, "headers": {"x-variant": "v2"}}
    direct = [(name, *rest[1:]) for name, *rest in outputs] if protocol == "http" else outputs
    url, images = guarded.served.server_info.url("grpc"), [photo.read_bytes() for photo in photos]

    expected = infer(url, "grpc", "classify", image_input("grpc", *images), **options | {"outputs": direct})

    tensor = image_input(protocol, *images)
    assert_same(infer(guarded.url(protocol), protocol, "classify", tensor, **options), expected)


@pytest.mark.parametrize("encoding", [None, "gzip", "deflate"])
@pytest.mark.parametrize("is_binary", [True, False], ids=["binary", "JSON"])
def test_numbers_pass_in_every_form(guarded, encoding, is_binary):
    values = np.random.default_rng(7).normal(size=(1, 3, 224, 224)).astype(np.float32)
    tensor = tritonclient.http.InferInput("input", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values, binary_data=is_binary)
    direct_input = client_input("grpc", "input", values)

    expected = infer(guarded.served.server_info.url("grpc"), "grpc", NETWORK, direct_input, model_version="1")

    options = {"model_version": "1", "request_compression_algorithm": encoding}
    assert_same(infer(guarded.url("http"), "http", NETWORK, tensor, **options), expected)


def test_reading_methods_pass(guarded, protocol):
    with CLIENTS[protocol].InferenceServerClient(guarded.url(protocol)) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("classify_v1", "1")
        assert not client.is_model_ready("no-such-model")
        metadata = client.get_server_metadata()
        model = client.get_model_metadata("classify")
        config = client.get_model_config("classify")
        statistics = client.get_inference_statistics("classify")
    if protocol == "http":
        names = metadata["name"], model["name"], config["name"], statistics["model_stats"][0]["name"]
    else:
        names = metadata.name, model.name, config.config.name, statistics.model_stats[0].name
    assert names == ("triton", "classify", "classify", "classify")


@pytest.mark.slow
def test_random_requests_are_answered(guarded):
    pids = [process.pid for process in resource_usage.tree(guarded.served.process.pid)]

    outcome = asyncio.run(fuzz(guarded.front, pids, 10 * REQUESTS, seed=1))

    assert outcome.wrong == []
    assert {"HTTP 200", "gRPC OK"} <= outcome.statuses.keys()


def test_killed_gateway_is_started_again(guarded):
    pid = guarded.pid
    (gateway,) = run_dir.find_gateways(guarded.served.base, REPOSITORY)

    os.kill(gateway.pid, signal.SIGKILL)

    assert '"gateway": "the gateway exited with status -9"' in guarded.served.why_not_ready()
    assert "the gateway exited with status -9" in guarded.served.log

    wait_until(guarded.served.is_ready, "the gateway")
    for protocol in CLIENTS:
        with Classifier(guarded.url(protocol), protocol) as classifier:
            assert classifier.classify(COFFEE).labels[0].index == ESPRESSO
    assert guarded.pid == pid


@pytest.mark.parametrize("way", ["sync", "async"])
def test_shared_memory_of_a_client_is_replaced_by_bytes(guarded, protocol, caplog, way):
    with opened(way, guarded.url(protocol), protocol, shared_memory="system") as classifier:
        check_bytes_are_sent(
            classifier, caplog, "the server refuses shared memory, as gateways and proxies do"
        )


def test_full_shared_memory_is_an_overload(tmp_path):
    """A request that /dev/shm has no room for gets a clear error without names; the next one is answered."""
    small = ["unshare", "--mount", "sh", "-ec", 'mount -t tmpfs -o size=24m tmpfs /dev/shm; exec "$@"', "sh"]
    if subprocess.run([*small, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    photo = encode(np.zeros((2800, 2800, 3), np.uint8), "BMP")

    with serving(REPOSITORY, tmp_path / "run", "--guard", launcher=small) as served:
        address = f"127.0.0.1:{served.ports['http']}"
        before = metric(address, "nereid_gateway_limit")
        for protocol in CLIENTS:
            for model in ("classify", "classify_v1"):
                with Classifier(f"127.0.0.1:{served.ports[protocol]}", protocol, model) as classifier:
                    with pytest.raises(Overloaded, match=r"overloaded: the memory .* share is full$"):
                        classifier.classify(photo)
                    assert classifier.classify(COFFEE).labels[0].index == ESPRESSO
        assert metric(address, "nereid_gateway_limit") < before

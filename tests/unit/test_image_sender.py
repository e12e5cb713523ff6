"""Images are sent in requests while shared memory is refused."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from nereid.assets import COFFEE
from nereid.client import image_sender, shared_regions, transport
from nereid.client.classifier_errors import (
    ClassifierError,
    Overloaded,
    RequestRefused,
    ServerFailed,
    TimedOut,
    Unavailable,
    Unreachable,
)
from nereid.client.image_sender import ImageSender
from nereid.client.retry import Attempts, Budget
from nereid.client.sans_io import Rpc
from nereid.client.shared_memory import Regions
from tests.classifiers import PREDICTION, Script, error, opened, serving

PHOTO = COFFEE.read_bytes()
NO_FILE = ServerFailed("Unable to open shared memory region: '/x'")
RESTRICTED = RequestRefused("This protocol is restricted, expecting header 'x'")
NOT_KNOWN = ServerFailed("Method not found!")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_regions, "FOLDER", tmp_path)
    return tmp_path


class Triton:
    """A server that raises `refusals`, by method, at every call, and records the way of each image."""

    def __init__(self, **refusals: ClassifierError) -> None:
        self.refusals = refusals
        self.ways: list[str] = []
        self.calls: list[str] = []

    def call(self, name: str, timeout_s: float, *args: Any, **options: Any) -> Any:
        verb = name.split("_")[0]
        self.calls.append(verb)
        if verb == "infer":
            is_shared = "shared_memory_region" in args[0].parameters
            self.ways.append("shared" if is_shared else "bytes")
            if is_shared and "infer" in self.refusals:
                raise ServerFailed(f"region {args[0].parameters['shared_memory_region']} is not there")
        elif verb in self.refusals:
            raise self.refusals[verb]
        return []

    def close(self) -> None:
        pass


class Sender:
    """A sender with regions and a clock of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(transport, "Connection", lambda url, protocol: Triton())
        self.now_s = 0.0
        self.regions = Regions("system", "localhost:1", "http", clock=lambda: self.now_s)
        self.images = ImageSender("http", self.regions, clock=lambda: self.now_s)

    def send(self, triton: Triton) -> str:
        steps = self.images.infer([PHOTO], Attempts(Budget(), 5), lambda tensor: Rpc("infer", 5, (tensor,)))
        transport.run(triton, steps)
        return triton.ways[-1]


@pytest.fixture
def sender(monkeypatch):
    made = Sender(monkeypatch)
    yield made
    made.regions.close()


@pytest.mark.parametrize(
    ("refusals", "reason"),
    [
        ({"get": RESTRICTED}, "fix: nereid serve --allow-shm"),
        ({"register": RESTRICTED}, "fix: nereid serve --allow-shm"),
        ({"register": NO_FILE}, "the server cannot open the region: it needs this machine's"),
        ({"get": NOT_KNOWN}, "as gateways and proxies do (Method not found!)"),
        ({"infer": NO_FILE}, "the server does not keep its regions"),
    ],
    ids=["not allowed", "not registered", "another folder", "gateway", "several servers"],
)
def test_refused_image_is_sent_as_bytes(sender, folder, caplog, refusals, reason):
    triton = Triton(**refusals)

    ways = [sender.send(triton) for _ in range(3)]

    assert ways == ["bytes"] * 3
    assert reason in sender.images.refusal
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    if "infer" not in refusals:
        assert not [*folder.iterdir()]


def test_decision_stays_for_a_while(sender):
    refusing, allowing = Triton(register=NO_FILE), Triton()
    sender.send(refusing)
    calls = len(refusing.calls)
    sender.now_s = image_sender.RETRY_S - 1
    assert sender.send(refusing) == "bytes"
    assert refusing.calls[calls:] == ["infer"]

    sender.now_s = image_sender.RETRY_S
    assert sender.send(refusing) == "bytes"
    assert "register" in refusing.calls[calls:]
    assert sender.send(allowing) == "bytes"
    sender.now_s *= 2
    assert sender.send(allowing) == "shared"
    assert sender.images.refusal == ""


@pytest.mark.parametrize(
    "failure", [TimedOut("late"), Unreachable("gone"), Unavailable("not loaded"), Overloaded("busy")], ids=str
)
def test_server_that_is_not_there_has_refused_nothing(sender, failure):
    with pytest.raises(type(failure)):
        sender.send(Triton(register=failure))

    assert sender.images.refusal == ""
    assert sender.send(Triton()) == "shared"


def test_broken_connection_of_a_client_ends_its_decision():
    """A client that sends bytes tries shared memory again after the connection broke."""
    script = Script(PREDICTION, None, PREDICTION)
    with serving(script) as url, opened("sync", url, "http", shared_memory="system") as classifier:
        classifier._requests.images._refuse("why")
        assert classifier.shared_memory_refusal == "why"
        classifier.classify(PHOTO)
        assert not [path for path, _ in script.requests if path.endswith("/register")]

        assert classifier.classify(PHOTO).timings.attempts == 2

        assert [path for path, _ in script.requests if path.endswith("/register")]
        assert classifier.shared_memory_refusal == ""


def test_error_of_an_image_is_not_a_refusal():
    script = Script(error("invalid image: why"), PREDICTION)
    with serving(script) as url, opened("sync", url, "http", shared_memory="system") as classifier:
        with pytest.raises(RequestRefused, match="invalid image"):
            classifier.classify(PHOTO)
        assert classifier.shared_memory_refusal == ""
    assert len(script.peers) == 1


def test_full_gpu_is_a_refusal(monkeypatch, folder):
    class Failure(Exception):
        """The exception of tritonclient's module."""

    def full(name: str, byte_size: int, device: int) -> None:
        raise Failure("unable to create cuda shared memory handle")

    library = SimpleNamespace(CudaSharedMemoryException=Failure, create_shared_memory_region=full)
    monkeypatch.setattr(shared_regions, "cuda_library", lambda: library)

    with pytest.raises(OSError, match="no memory of GPU 0: unable to create"):
        shared_regions.MAKERS["cuda"](1)

    assert not [*folder.iterdir()]

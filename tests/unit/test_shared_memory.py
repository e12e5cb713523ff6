"""Shared memory without Triton: no region stays, and none that a server may read is written."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from nereid.base.assets import CHELSEA, COFFEE
from nereid.client import client_errors as errors
from nereid.client import shared_memory
from nereid.client.retry import Attempts, RetryBudget
from nereid.client.shared_memory import SHM_FOLDER, NoCuda, Region, SharedMemory, SharedMemoryRefused
from nereid.client.transport import run
from tests.classifiers import PREDICTION, WAYS, Script, opened, serving
from tests.commands import captured
from tests.routes import wait_until
from tests.tables import cases

both_ways = pytest.mark.parametrize("way", ["sync", "async"])
PHOTO = COFFEE.read_bytes()
NO_FILE = errors.ServerFailed("Unable to open shared memory region: '/x'")
RESTRICTED = errors.RequestRefused("This protocol is restricted, expecting header 'x'")


@pytest.fixture(autouse=True)
def files(monkeypatch, request) -> Callable[[], set[str]]:
    prefix = f"nereid-{os.getpid()}-{abs(hash(request.node.nodeid))}-"
    monkeypatch.setattr(shared_memory, "name_prefix", lambda: prefix)
    return lambda: {path.name for path in SHM_FOLDER.glob(f"{prefix}*")}


def sent(script: Script, word: str) -> list[str]:
    return [path.split("/")[-2] for path, _ in script.requests if path.endswith(f"/{word}")]


class Triton:
    """A connection to a server with regions; `errors`, by method, are one for all calls, or one for each."""

    url, protocol = "localhost:1", "http"

    def __init__(self) -> None:
        self.known, self.errors, self.calls = [], {}, []

    async def call(self, name: str, remaining_s: float, *args: Any) -> Any:
        verb = name.split("_")[0]
        self.calls.append(verb)
        error = self.errors.get(verb)
        if error := (error.pop(0) if error else None) if isinstance(error, list) else error:
            raise error
        if verb == "register":
            self.known.append(args[0])
        elif verb == "unregister" and args[0] in self.known:
            self.known.remove(args[0])
        return [{"name": name} for name in self.known]

    read = call


class Client:
    """Shared memory and a clock of the test; `send` returns the region of the image, None if it has none."""

    def __init__(self, triton: Triton) -> None:
        self.now_s, self.triton = 0.0, triton
        self.memory = SharedMemory("system", triton, clock=lambda: self.now_s)  # type: ignore[arg-type]

    def send(self) -> str | None:
        used = []

        async def infer(tensor: Any) -> str:
            used.append(tensor.parameters["shared_memory_region"])
            if isinstance(self.triton.errors.get("infer"), str):
                raise errors.ServerFailed(f"region {used[-1]} is not there")
            await self.triton.call("infer", 5)
            return "answer"

        answer = run(self.memory.infer([PHOTO], Attempts(RetryBudget(), 5), infer))
        return used[-1] if answer else None


@pytest.fixture
def client():
    made = Client(Triton())
    yield made
    made.memory.close()


@cases(
    not_allowed=({"register": RESTRICTED}, "fix: nereid serve --allow-shm"),
    another_folder=({"register": NO_FILE}, "the server cannot open the region: it needs this machine's"),
    gateway=({"register": errors.ServerFailed("no method")}, "as gateways and proxies do (no method)"),
    several_servers=({"infer": "lost"}, "the server does not keep its regions"),
)
def test_refused_image_is_sent_as_bytes(failures, reason, client, files, caplog):
    client.triton.errors = failures

    assert [client.send() for _ in range(3)] == [None] * 3
    assert reason in client.memory.refusal
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    # One of several servers may have the region; the next attempt releases it.
    assert len(files()) == ("infer" in failures)
    client.now_s += shared_memory.RETRY_INTERVAL_S
    assert client.send() is None
    assert len(files()) == ("infer" in failures)


def test_decision_stays_for_a_while(client, caplog):
    client.triton.errors = {"register": NO_FILE}
    client.send()
    client.now_s = shared_memory.RETRY_INTERVAL_S - 1
    client.send()
    assert client.triton.calls == ["register"]
    client.now_s = shared_memory.RETRY_INTERVAL_S
    client.send()
    assert client.triton.calls == ["register"] * 2
    assert len(caplog.records) == 1

    client.triton.errors = {}
    assert client.send() is None
    client.now_s *= 2
    assert client.send()
    assert client.memory.refusal == ""


@pytest.mark.parametrize("kind", [errors.TimedOut, errors.Unreachable, errors.Unavailable, errors.Overloaded])
def test_server_that_is_not_there_has_refused_nothing(client, kind):
    client.triton.errors = {"register": [kind("why")]}
    with pytest.raises(kind):
        client.send()

    assert client.memory.refusal == ""
    assert client.send()


def test_forgotten_region_is_registered_again(client):
    """As after a restart of the server."""
    first = client.send()
    client.triton.errors = {"infer": [errors.ServerFailed(f"Unable to find shared memory region: '{first}'")]}

    assert client.send() == first
    assert client.triton.calls.count("register") == 2


BROKEN_STREAM = errors.from_triton(
    InferenceServerException("Received RST_STREAM with error code 2", "StatusCode.INTERNAL")
)


@cases(
    failed=(errors.ServerFailed("in ensemble 'x', inference failed: why"), True),
    refused=(errors.RequestRefused("why"), True),
    broken_stream=(BROKEN_STREAM, False),
    late=(errors.TimedOut("deadline exceeded: why"), False),
)
def test_region_is_used_again_after_an_answer_of_tritons_own(failure, is_same, client, files):
    """A broken stream may have the status of a response, and proves nothing."""
    client.triton.errors = {"infer": [failure]}
    with suppress(errors.NereidError):
        client.send()
    (first,) = files()

    assert (client.send() == first) == is_same
    assert client.triton.known == [*files()]


def test_retired_region_is_removed_after_its_release(client, files):
    """At most once a second, a request also tries that; the request does not fail with it."""
    in_use, broken = errors.ServerFailed("it is currently in use"), errors.Unreachable("broken")
    client.triton.errors = {"infer": [broken], "unregister": [in_use, broken]}
    with pytest.raises(errors.Unreachable):
        client.send()
    (first,) = files()

    assert client.send() == client.send() != first
    assert client.triton.calls.count("unregister") == 1
    client.now_s += shared_memory.RELEASE_RETRY_INTERVAL_S
    assert client.send()
    assert (client.triton.calls.count("unregister"), first in files()) == (2, True)
    client.now_s += shared_memory.RELEASE_RETRY_INTERVAL_S
    client.send()
    assert first not in files()


def test_smallest_region_that_fits_is_used(client):
    small, large = (Region("system", size) for size in (2**20, 2**24))
    client.memory._idle += [large, small]

    assert client.send() == small.name


def test_files_of_a_killed_group_of_processes_are_removed(client, files):
    """The file of a living owner is locked, and a new one may not be locked yet."""
    alive = Region("system", 1)
    prefix = shared_memory.name_prefix()
    dead, new = (SHM_FOLDER / f"{prefix}{word}" for word in ("dead", "new"))
    for path in (dead, new):
        path.touch()
    for name in (dead.name, alive.name):
        os.utime(SHM_FOLDER / name, (0, 0))

    client.send()

    assert files() >= {alive.name, new.name}
    assert dead.name not in files()
    new.unlink()
    alive.destroy()


def test_regions_of_killed_owners_are_released(client, files):
    """Their files are gone; a region with a file, or of another user, stays."""
    prefix = shared_memory.name_prefix()
    alive = Region("system", 1)
    client.triton.known = ["nereid-another-1", f"{prefix}gone", alive.name]

    name = client.send()

    assert client.triton.known == ["nereid-another-1", alive.name, name]
    alive.destroy()
    assert files() == {name}


def test_request_in_flight_outlives_close(client, files):
    async def infer(tensor: Any) -> str:
        client.memory.close()
        assert len(files()) == 1
        return "answer"

    assert run(client.memory.infer([PHOTO], Attempts(RetryBudget(), 5), infer)) == "answer"

    assert not files()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.send()


@both_ways
@pytest.mark.parametrize("step", ["silence", None], ids=["silent", "broken"])
def test_region_without_an_answer_is_never_used_again(monkeypatch, files, way, step):
    """While the server reads a region, no process writes or shrinks it."""
    monkeypatch.setattr(shared_memory, "CLOSE_TIMEOUT_S", 0.2)
    script = Script(PREDICTION, step, PREDICTION)
    with serving(script) as url, opened(way, url, "http", shared_memory="system") as classifier:
        classifier.classify(PHOTO)
        (first,) = script.read = files()
        if step is None:  # repeated immediately, with another region
            assert classifier.classify(PHOTO).timings.attempts == 2
        else:
            with pytest.raises(errors.TimedOut):
                classifier.classify(PHOTO, timeout_s=0.1)
        classifier.classify(CHELSEA)
        content = (SHM_FOLDER / first).read_bytes()

    assert content[: 4 + len(PHOTO)] == len(PHOTO).to_bytes(4, "little") + PHOTO
    assert len(sent(script, "register")) == 2
    assert {*sent(script, "unregister")} == {*sent(script, "register")}
    assert not files()


@both_ways
def test_close_waits_for_a_server_that_reads(files, way):
    script = Script("silence")
    with serving(script) as url, opened(way, url, "http", shared_memory="system") as classifier:
        with pytest.raises(errors.TimedOut):
            classifier.classify(PHOTO, timeout_s=0.1)
        (region,) = script.read = files()
        threading.Timer(0.3, script.read.clear).start()

    assert len(sent(script, "unregister")) > 1
    assert {*sent(script, "unregister")} == {region}
    assert not script.read
    assert not files()


def test_broken_connection_of_a_client_ends_its_decision():
    """A client that sends bytes tries shared memory again after the connection broke."""
    script = Script(PREDICTION, None, PREDICTION)
    script.refuses_regions = True
    with serving(script) as url, opened("sync", url, "http", shared_memory="system") as classifier:
        classifier.classify(PHOTO)
        assert "as gateways and proxies do" in classifier.shared_memory_refusal
        script.refuses_regions = False

        assert classifier.classify(PHOTO).timings.attempts == 2

        assert len(sent(script, "register")) == 2
        assert classifier.shared_memory_refusal == ""


OWN = """
import os, sys
from nereid.client import shared_memory
from nereid.tasks.classify.client import Classifier
url, prefix, *photos = sys.argv[1:]
shared_memory.name_prefix = lambda: prefix
def files():
    return {*shared_memory.SHM_FOLDER.glob(f"{prefix}*")}
classifier = Classifier(url, "http", shared_memory="system")
classifier.classify(photos[0])
(mine,) = files()
"""
FORK = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork with threads
before = mine.read_bytes()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert mine.read_bytes() == before
    assert files() == {mine}
else:
    classifier.classify(photos[1])
    assert len(files()) == 2
"""
KILLED = "import signal; os.kill(os.getpid(), signal.SIGKILL)"


@cases(("program", "released"), fork=(FORK, 2), killed=(KILLED, 0), exit=("", 1))
def test_end_of_a_process_removes_only_its_own_regions(files, program, released):
    script = Script(PREDICTION)
    words = [shared_memory.name_prefix(), str(COFFEE), str(CHELSEA)]
    with serving(script) as url:
        command = [sys.executable, "-c", OWN + program, url, *words]
        done = captured(command, timeout=60)
    if program != KILLED:
        assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: not files(), "the end of the regions")
    assert len({*sent(script, "unregister")}) == released


def test_full_memory_is_a_refusal_not_a_crash(files):
    """Pages are reserved first: a write to a missing page would be a bus error."""
    size = os.statvfs(SHM_FOLDER)
    more_than_all = size.f_blocks * size.f_frsize + 2**30  # is refused at once
    with pytest.raises(SharedMemoryRefused, match=r"No space left on device: '/dev/shm/nereid-"):
        Region("system", more_than_all)

    assert not files()


def test_full_gpu_is_a_refusal(monkeypatch):
    class Failure(Exception):
        """The exception of tritonclient's module."""

    def full(name: str, byte_size: int, device: int) -> None:
        raise Failure("unable to create cuda shared memory handle")

    library = SimpleNamespace(CudaSharedMemoryException=Failure, create_shared_memory_region=full)
    monkeypatch.setattr(shared_memory, "cuda_library", lambda: library)

    with pytest.raises(SharedMemoryRefused, match="no memory of GPU 0: unable to create"):
        Region("cuda", 1)


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_cuda_without_a_gpu_is_refused_immediately(way):
    with suppress(NoCuda):
        shared_memory.cuda_library()
        pytest.skip("this machine has a GPU")
    needs = pytest.raises(NoCuda, match=r"CUDA shared memory needs an NVIDIA GPU .*; fix: ")
    with needs, opened(way[0], "localhost:1", way[1], shared_memory="cuda"):
        pass

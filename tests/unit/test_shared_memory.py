"""Regions without Triton: what may still be read is left alone, everything else goes."""

import fcntl
import os

import pytest

from clients import shared_memory, transport
from clients.classifier import Classifier
from clients.errors import ServerFailed, TimedOut, Unreachable
from clients.retry import Attempts, Budget
from clients.samples import CHELSEA, COFFEE
from clients.shared_memory import Regions, is_stale, remove_stale
from clients.steps import Call
from tests.classifiers import PREDICTION, WAYS, Script, error, opened, serving

PHOTO = COFFEE.read_bytes()
PREFIX = f"nereid-{os.getuid()}-"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Where regions lie: a folder of the test's own, as nothing but Triton needs the true one."""
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    return tmp_path


def files() -> set[str]:
    """Return this user's regions."""
    return {path.name for path in shared_memory.FOLDER.glob(f"{PREFIX}*")}


def sent(script: Script, word: str) -> list[str]:
    """Return the names of the regions that a server was told to `register` or `unregister`."""
    return [path.split("/")[-2] for path, _ in script.calls if path.endswith(f"/{word}")]


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("step", ["silence", None], ids=["silent", "broken"])
def test_region_without_an_answer_is_never_used_again(folder, way, step):
    """While the server reads it, it is neither written, nor shrunk, nor unlinked, also when all is closed."""
    script = Script(PREDICTION, step, PREDICTION)
    with serving(script) as url, opened(way, url, "http", shared_memory="system") as classifier:
        classifier.classify(PHOTO)
        (first,) = script.read = files()
        if step is None:  # repeated at once, by another region
            assert classifier.classify(PHOTO).timings.attempts == 2
        else:
            with pytest.raises(TimedOut):
                classifier.classify(PHOTO, timeout_s=0.1)
        classifier.classify(CHELSEA)
        content = (folder / first).read_bytes()

    assert content[: 4 + len(PHOTO)] == len(PHOTO).to_bytes(4, "little") + PHOTO
    assert len(sent(script, "register")) == 2
    assert {*sent(script, "unregister")} == {*sent(script, "register")}
    assert remove_stale() == [first]


@pytest.mark.parametrize("way", ["sync", "async"])
def test_region_with_an_error_for_an_answer_is_used_again(way):
    """The server has told that it is done."""
    script = Script(PREDICTION, error("inference failed: why", 500), PREDICTION)
    with serving(script) as url, opened(way, url, "http", shared_memory="system") as classifier:
        classifier.classify(PHOTO)
        with pytest.raises(ServerFailed):
            classifier.classify(PHOTO)
        classifier.classify(PHOTO)

    assert len(sent(script, "register")) == 1
    assert sent(script, "unregister") == sent(script, "register")


def test_retired_region_goes_when_the_server_lets_go_of_it():
    """It is asked about now and then, not with every request."""
    now = 0.0
    script = Script(None, PREDICTION)
    with serving(script) as url:
        connection = transport.connect(url, "http")
        regions = Regions("system", url, "http", clock=lambda: now)

        def ask() -> int:
            attempts = Attempts(Budget(), 5)
            options = {"model": "m", "headers": {}}
            steps = regions.infer(
                [PHOTO], attempts, lambda tensor: Call("infer", 5, (), options | {"inputs": [tensor]})
            )
            transport.run(connection, steps)
            return len(sent(script, "unregister"))

        with pytest.raises(Unreachable):
            ask()
        (first,) = script.read = files()
        assert (ask(), ask()) == (1, 1)
        now += 1
        assert ask() == 2
        assert first in files()
        script.read = set()
        now += 1
        assert ask() == 3
        assert first not in files()
        regions.close()
        connection.close()
    assert not files()


def test_region_of_a_living_owner_is_not_stale(tmp_path):
    """Nor is what is no region at all."""
    path = tmp_path / f"{PREFIX}1"
    assert is_stale(path)
    path.write_bytes(b"")
    assert is_stale(path)
    with path.open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert not is_stale(path)
    link = tmp_path / f"{PREFIX}2"
    link.symlink_to(path)
    assert not is_stale(link)
    assert not is_stale(tmp_path)


def test_fork_leaves_its_parents_regions_alone():
    """A child that ends in good order takes nothing away that is not its own."""
    script = Script(PREDICTION)
    with serving(script) as url, Classifier(url, "http", shared_memory="system") as classifier:
        classifier.classify(PHOTO)
        before = files()
        classifier._farewell.peek()[1].__self__._owner -= 1
        classifier._farewell.peek()[1]()
        assert files() == before
        assert not sent(script, "unregister")
        classifier._farewell.peek()[1].__self__._owner += 1


def test_full_memory_is_an_error_not_a_crash(folder):
    """Pages are reserved first: to write to one that cannot be had would be a bus error."""
    free = os.statvfs(folder)
    too_much = free.f_bavail * free.f_frsize + 2**30

    with pytest.raises(OSError, match="No space left on device"):
        shared_memory.MAKERS["system"](too_much)

    assert not files()


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_cuda_without_a_gpu_is_refused_at_once(way):
    """With what it needs; asking for CUDA where there is none is no slow success."""
    if shared_memory_has_cuda():
        pytest.skip("there is a GPU")
    needs = pytest.raises(shared_memory.NoCuda, match=r"CUDA shared memory needs an NVIDIA GPU .*; mend: ")
    with needs, opened(way[0], "localhost:1", way[1], shared_memory="cuda"):
        pass


def shared_memory_has_cuda() -> bool:
    """Tell whether this machine has a GPU for CUDA shared memory."""
    try:
        shared_memory.cuda_library()
    except shared_memory.NoCuda:
        return False
    return True

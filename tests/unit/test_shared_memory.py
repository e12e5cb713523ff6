"""Regions without Triton: a region that the server may read stays, all others are removed."""

import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from nereid.assets import CHELSEA, COFFEE
from nereid.client import shared_memory, shared_regions, transport
from nereid.client.classifier_errors import (
    ClassifierError,
    RequestRefused,
    ServerFailed,
    TimedOut,
    Unreachable,
    from_triton,
)
from nereid.client.retry import Attempts, Budget
from nereid.client.sans_io import Rpc
from nereid.client.shared_memory import Regions
from nereid.client.shared_regions import is_stale, remove_stale
from tests.classifiers import PREDICTION, WAYS, Script, opened, serving
from tests.tables import cases

both_ways = pytest.mark.parametrize("way", ["sync", "async"])
PHOTO = COFFEE.read_bytes()
PREFIX = f"nereid-{os.getuid()}-"


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """A folder of the test for the regions; only Triton needs the real one."""
    monkeypatch.setattr(shared_regions, "FOLDER", tmp_path)
    return tmp_path


def files() -> set[str]:
    return {path.name for path in shared_regions.FOLDER.glob(f"{PREFIX}*")}


def sent(script: Script, word: str) -> list[str]:
    """Return the names of the regions in all requests to `register` or `unregister`."""
    return [path.split("/")[-2] for path, _ in script.requests if path.endswith(f"/{word}")]


@both_ways
@pytest.mark.parametrize("step", ["silence", None], ids=["silent", "broken"])
def test_region_without_an_answer_is_never_used_again(monkeypatch, folder, way, step):
    """While the server reads a region, no process writes, shrinks or unlinks it, not even in `close`."""
    monkeypatch.setattr(shared_memory, "CLOSE_S", 0.2)
    script = Script(PREDICTION, step, PREDICTION)
    with serving(script) as url, opened(way, url, "http", shared_memory="system") as classifier:
        classifier.classify(PHOTO)
        (first,) = script.read = files()
        if step is None:  # repeated immediately, with another region
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


@both_ways
def test_close_waits_for_a_server_that_reads(way):
    script = Script("silence")
    with serving(script) as url, opened(way, url, "http", shared_memory="system") as classifier:
        with pytest.raises(TimedOut):
            classifier.classify(PHOTO, timeout_s=0.1)
        (region,) = script.read = files()
        threading.Timer(0.3, script.read.clear).start()

    assert {*sent(script, "unregister")} == {region}
    assert not files()


def test_retired_region_is_removed_after_its_release():
    now = 0.0
    script = Script(None, PREDICTION)
    with serving(script) as url:
        connection = transport.Connection(url, "http")
        regions = Regions("system", url, "http", clock=lambda: now)

        def classify() -> int:
            attempts = Attempts(Budget(), 5)
            options = {"model": "m", "headers": {}, "outputs": (), "request_id": "1", "timeout": 1}
            steps = regions.infer(
                [PHOTO], attempts, lambda tensor: Rpc("infer", 5, (), options | {"inputs": [tensor]})
            )
            transport.run(connection, steps)
            return len(sent(script, "unregister"))

        with pytest.raises(Unreachable):
            classify()
        (first,) = script.read = files()
        assert (classify(), classify()) == (1, 1)
        now += 1
        assert classify() == 2
        assert first in files()
        script.read = set()
        now += 1
        assert classify() == 3
        assert first not in files()
        regions.close()
        connection.close()
    assert not files()


def test_region_of_a_living_owner_is_not_stale(tmp_path, monkeypatch):
    path = tmp_path / f"{PREFIX}1"
    assert not is_stale(path)
    path.write_bytes(b"")
    assert is_stale(path)
    with path.open() as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert not is_stale(path)
    link, pipe = tmp_path / f"{PREFIX}2", tmp_path / f"{PREFIX}3"
    link.symlink_to(path)
    os.mkfifo(pipe)
    assert not any(map(is_stale, (link, pipe, tmp_path)))
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    assert not is_stale(path)


def test_region_that_is_being_made_is_not_removed(monkeypatch):
    """A file exists a moment before its owner's lock; a sweep locks it first, and the owner notices."""
    (shared_regions.FOLDER / f"{PREFIX}1").write_bytes(b"")
    unlink, flock = Path.unlink, fcntl.flock

    def watched(path: Path, **options: bool) -> None:
        with path.open() as owner, pytest.raises(BlockingIOError):
            flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", watched)
    assert remove_stale() == [f"{PREFIX}1"]
    monkeypatch.undo()

    def swept_before(handle: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        Path(f"/proc/self/fd/{handle}").readlink().unlink()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", swept_before)
    region = shared_regions.Region(1)
    assert Path(f"/proc/self/fd/{region.handle}").readlink().exists()
    region.remove()


class Triton:
    """A connection to a server: `known` are its regions; `refusals`, by method, are raised in turn."""

    def __init__(self, *known: str, **refusals: list[ClassifierError | None]) -> None:
        self.known = [*known]
        self.refusals = refusals
        self.timeouts_s: list[float] = []

    def call(self, name: str, timeout_s: float, *args: Any, **options: Any) -> Any:
        self.timeouts_s.append(timeout_s)
        verb = name.split("_")[0]
        if (refusals := self.refusals.get(verb)) and (error := refusals.pop(0)):
            raise error
        if verb == "register":
            self.known.append(args[0])
        elif verb == "unregister" and args[0] in self.known:
            self.known.remove(args[0])
        return [{"name": name} for name in self.known]

    def close(self) -> None:
        """Do nothing: the fake has no socket."""


def classify(regions: Regions, triton: Triton) -> str:
    """Classify an image; return the name of its region."""
    names = []

    def call(tensor: Any) -> Rpc:
        names.append(tensor.parameters["shared_memory_region"])
        return Rpc("infer", 5)

    with suppress(ClassifierError):
        transport.run(triton, regions.infer([PHOTO], Attempts(Budget(), 5), call))
    return names[0] if names else ""


@pytest.fixture
def regions(monkeypatch):
    monkeypatch.setattr(transport, "Connection", lambda url, protocol: Triton(unregister=[Unreachable()]))
    made = Regions("system", "localhost:1", "http")
    yield made
    made.close()


class Late(Triton):
    """A server that handles a registration after its timeout, and after the request to release it."""

    is_late = False

    def call(self, name: str, timeout_s: float, *args: Any, **options: Any) -> Any:
        if name.startswith("register") and not self.is_late:
            self.is_late = True
            raise TimedOut("deadline exceeded: why")
        found = super().call(name, timeout_s, *args, **options)
        if name.startswith("unregister") and (shared_regions.FOLDER / args[0]).exists():
            self.known.append(args[0])  # the late registration finds the file
        return found


def test_region_that_is_registered_too_late_is_not_kept(regions):
    """A server that handles a late registration finds no file."""
    triton = Late()
    classify(regions, triton)
    (late,) = files()
    name = classify(regions, triton)

    assert name != late
    assert triton.known == [name]
    assert files() == {name}


@pytest.mark.parametrize("is_shared", [True, False], ids=["same machine", "other container"])
def test_region_without_a_file_is_stale_where_files_are_shared(is_shared):
    """Otherwise another container owns it; a region in use does not stop the sweep of others."""
    left, gone, in_use = (f"{PREFIX}{number}" for number in range(3))
    for name in (left, in_use):
        (shared_regions.FOLDER / name).write_bytes(b"")
    answers = [None] if is_shared else []  # to the registration of a file of this process
    refusals = [*answers, ServerFailed("it is currently in use")]
    shown = answers or [RequestRefused("Unable to open")]
    triton = Triton("x", in_use, gone, left, register=shown, unregister=refusals)
    times_s = iter(range(9, 0, -1))

    removed = transport.run(triton, shared_memory.sweep("http", lambda: next(times_s)))

    assert {*removed} == ({left, gone} if is_shared else {left})
    assert {*triton.known} == ({"x", in_use} if is_shared else {"x", in_use, gone})
    assert files() == {in_use}
    assert triton.timeouts_s == [*range(9, 9 - len(triton.timeouts_s), -1)]  # the time left for all RPCs


BROKEN_STREAM = from_triton(
    InferenceServerException("Received RST_STREAM with error code 2", "StatusCode.INTERNAL")
)


@cases(
    ("verb", "error", "is_same"),
    {
        "failed": ("infer", ServerFailed("in ensemble 'x', inference failed: why"), True),
        "refused": ("infer", RequestRefused("why"), True),
        "broken stream": ("infer", BROKEN_STREAM, False),
        "late": ("infer", TimedOut("deadline exceeded: why"), False),
        "registered before": ("register", ServerFailed("shared memory region 'x' already in manager"), True),
    },
)
def test_region_is_used_again_after_an_answer_of_tritons_own(regions, verb, error, is_same):
    """A broken stream may have the status of a response, and proves nothing."""
    triton = Triton(**{verb: [error, None]})
    classify(regions, triton)
    (first,) = files()

    assert (classify(regions, triton) == first) == is_same


def test_close_leaves_the_region_of_a_request(regions):
    steps = regions.infer([PHOTO], Attempts(Budget(), 5), lambda tensor: Rpc("infer", 5))
    step = steps.send(None)
    while step.name != "infer":
        step = steps.send([])
    (name,) = files()
    regions.close()
    assert not is_stale(shared_regions.FOLDER / name)
    with pytest.raises(StopIteration):
        steps.send("an answer")
    assert is_stale(shared_regions.FOLDER / name)

    with pytest.raises(RuntimeError, match="the classifier is closed"):
        classify(regions, Triton())
    assert files() == {name}


FORK = """
import os, sys
from pathlib import Path
from nereid.client import shared_regions
from nereid.client.classifier import Classifier
shared_regions.FOLDER = Path(sys.argv[2])
def of(pid):
    return {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.exists()}
classifier = Classifier(sys.argv[1], "http", shared_memory="system")
classifier.classify(sys.argv[3])
(mine,) = shared_regions.FOLDER.iterdir()
before = mine.read_bytes()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert mine.read_bytes() == before
    assert {*shared_regions.FOLDER.iterdir()} == {mine}
    assert not shared_regions.is_stale(mine)
    classifier.close()
else:
    assert str(mine) not in of("self")
    classifier.classify(sys.argv[4])
    assert len({*shared_regions.FOLDER.iterdir()}) == 2
"""


def test_fork_leaves_its_parents_regions_alone(folder):
    script = Script(PREDICTION)
    with serving(script) as url:
        command = [sys.executable, "-c", FORK, url, str(folder), str(COFFEE), str(CHELSEA)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert not files()
    assert len({*sent(script, "register")}) == len(sent(script, "unregister")) == 2


def test_full_memory_is_an_error_not_a_crash(monkeypatch):
    """Pages are reserved first: a write to a missing page would be a bus error."""
    size = os.statvfs("/dev/shm")
    more_than_all = size.f_blocks * size.f_frsize + 2**30  # is refused at once
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        monkeypatch.setattr(shared_regions, "FOLDER", Path(folder))
        with pytest.raises(OSError, match="No space left on device"):
            shared_regions.MAKERS["system"](more_than_all)

        assert not files()


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_cuda_without_a_gpu_is_refused_immediately(way):
    with suppress(shared_regions.NoCuda):
        shared_regions.cuda_library()
        pytest.skip("this machine has a GPU")
    needs = pytest.raises(shared_regions.NoCuda, match=r"CUDA shared memory needs an NVIDIA GPU .*; fix: ")
    with needs, opened(way[0], "localhost:1", way[1], shared_memory="cuda"):
        pass

"""`nereid top` and the metrics of processes with a guarded server under load."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loadtest.torture.traffic import Traffic, classifiers
from nereid.assets import REPOSITORY
from tests.routes import wait_until
from tests.supervised import NEREID, Served, serving
from tests.tables import cases

pytestmark = pytest.mark.nightly(minutes=1)

CALLERS, PER_S, INTERVAL_S = 4, 4.0, 6.0
# A frame begins at the top left of the screen.
HOME = b"\x1b[H"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
LINES, COLUMNS = 24, 80
# 3 of 4 requests go to v1.
WEIGHTS = {"v1": 3, "v2": 1}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("top")
    repository = shutil.copytree(REPOSITORY, folder / "models")
    file = repository / "classify.route.json"
    document = json.loads(file.read_text())
    for variant in document["variants"]:
        variant["weight"] = WEIGHTS[variant["name"]]
    file.write_text(json.dumps(document))
    with serving(repository, folder / "run", "--guard") as found:
        yield found


@pytest.fixture(scope="module")
def load(served):
    """A steady load, whose rate depends little on the speed of the machine."""
    callers = classifiers(lambda protocol: f"127.0.0.1:{served.ports[protocol]}", "classify", CALLERS, PER_S)
    with Traffic(callers) as running:
        wait_until(lambda: running.sent > CALLERS, "requests")
        yield running


def command(served: Served, *words: str) -> list[str]:
    return [NEREID, "top", "--repository", str(served.repository), *words]


def environment(served: Served) -> dict[str, str]:
    (run,) = (path for path in served.repository.parent.iterdir() if path.name == "run")
    return os.environ | {"XDG_RUNTIME_DIR": str(run), "TERM": "xterm-256color"}


def measured(served: Served, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(served, "--once", *words), env=environment(served), capture_output=True, text=True
    )


def test_one_measurement_has_the_rates_of_the_load(served, load):
    before, begin_s = load.sent, time.monotonic()
    done = measured(served, "--json", "--interval", str(INTERVAL_S))
    rate = (load.sent - before) / (time.monotonic() - begin_s)

    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    (route,), (gateway,) = found["routes"], found["gateways"]
    assert sum(each["requests_per_s"] for each in route["variants"]) == pytest.approx(rate, rel=0.2)
    models = {each["name"]: each for each in found["models"]}
    assert models["classify"]["requests_per_s"] == pytest.approx(rate, rel=0.2)
    assert gateway["requests_per_s"] == pytest.approx(rate, rel=0.2)
    assert gateway["p99_ms"] > 0
    assert {each["name"]: each["expected_share"] for each in route["variants"]} == {"v1": 0.75, "v2": 0.25}
    assert sum(each["share"] for each in route["variants"]) == pytest.approx(1)
    assert all(each["p50_ms"] <= each["p99_ms"] for each in route["variants"])
    assert [each["errors_per_s"] for each in route["variants"]] == [0, 0]
    assert found["server"]["ready"] is True
    assert models["classify_v1"]["instances"] == len(served.stubs("classify_v1"))
    names = {each["name"]: each["memory_bytes"] for each in found["processes"]}
    assert {*names} == {"supervisor", "tritonserver", "gateway", "classify", "classify_v1", "classify_v2"}
    assert min(names.values()) > 2**20
    tables = measured(served, "--interval", "1").stdout
    assert (tables.startswith("ready  up "), "\x1b" in tables) == (True, False)
    assert re.search(r"^classify v1 +75 %", tables, re.MULTILINE)


class Terminal:
    def __init__(self, process: subprocess.Popen, descriptor: int) -> None:
        self.process, self._descriptor, self._output = process, descriptor, b""

    def read(self) -> bytes:
        while select.select([self._descriptor], [], [], 0)[0]:
            self._output += os.read(self._descriptor, 2**16)
        return self._output

    def frames(self) -> list[list[str]]:
        texts = [ESCAPES.sub("", frame.decode()) for frame in self.read().split(HOME)[1:]]
        return [text.splitlines() for text in texts if len(text.splitlines()) >= LINES]

    def wait_for(self, is_shown: Callable[[list[list[str]]], object], what: str) -> list[list[str]]:
        def found() -> list[list[str]]:
            frames = self.frames()
            assert self.process.poll() is None, ESCAPES.sub("", self.read().decode())[-2000:]
            return frames if frames and is_shown(frames) else []

        shown: list[list[str]] = wait_until(found, what)
        return shown

    def press(self, key: bytes) -> None:
        os.write(self._descriptor, key)

    def code(self) -> int:
        def is_over() -> bool:
            self.read()  # the process waits until its output is read
            return self.process.poll() is not None

        wait_until(is_over, "end of the view")
        return int(self.process.returncode)

    @property
    def is_plain(self) -> bool:
        flags = termios.tcgetattr(self._descriptor)[3]
        return bool(flags & termios.ECHO and flags & termios.ICANON)


@contextlib.contextmanager
def opened(served: Served) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    # `setsid` makes it the terminal of the process, so that Ctrl-C is a signal. `pty.fork` could hang: it
    # runs Python between fork and exec, while threads of gRPC hold locks.
    words = ["setsid", "--ctty", *command(served, "--interval", "0.5")]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment(served))
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)


@cases("key", {"q": b"q", "Ctrl-C": b"\x03", "SIGINT": b""})
def test_live_view_fits_80_columns_and_ends(served, load, key):
    with opened(served) as terminal:
        frame = terminal.wait_for(lambda frames: "q ends" in str(frames[-1]), "a frame")[-1]
        if key:
            terminal.press(key)
        else:
            terminal.process.send_signal(signal.SIGINT)

        assert terminal.code() == 0
        assert terminal.is_plain
    assert max(map(len, frame)) <= COLUMNS
    assert frame[0].startswith("ready  up ")
    headings = [line.split()[0] for line in frame if line.strip()]
    assert {"route", "model", "classify", "classify_v1", "classify_v2", "gateway"} <= {*headings}

"""`nereid top` and the metrics of processes with a guarded server under load."""

import fcntl
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import termios
import time
from typing import Any

import pytest

from loadtest.torture.traffic import Traffic, classifiers
from nereid.base.assets import REPOSITORY
from tests.publishing import edit_route
from tests.routes import variant, wait_until
from tests.supervised import NEREID, serving
from tests.tables import cases

pytestmark = pytest.mark.nightly(minutes=1)

CALLERS, PER_S, INTERVAL_S = 4, 4.0, 6.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
LINES, COLUMNS = 24, 80


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("top")
    repository = shutil.copytree(REPOSITORY, folder / "models")
    # 3 of 4 requests go to v1.
    variants = [variant("v1", "classify_v1", 3), variant("v2", "classify_v2", 1)]
    edit_route(repository, "classify", variants=variants)
    with serving(repository, folder / "run", "--guard") as server:
        yield server


@pytest.fixture(scope="module")
def load(served):
    """A steady load, whose rate depends little on the speed of the machine."""
    callers = classifiers(lambda protocol: f"127.0.0.1:{served.ports[protocol]}", "classify", CALLERS, PER_S)
    with Traffic(callers) as running:
        wait_until(lambda: running.sent > CALLERS, "requests")
        yield running


def test_one_measurement_has_the_rates_of_the_load(served, load):
    before, begin_s = load.sent, time.monotonic()
    done = served.run("top", "--once", "--json", "--interval", str(INTERVAL_S))
    rate = (load.sent - before) / (time.monotonic() - begin_s)

    measurement: dict[str, Any] = json.loads(done.stdout)
    (route,), (gateway,) = measurement["routes"], measurement["gateways"]
    assert sum(row["requests_per_s"] for row in route["variants"]) == pytest.approx(rate, rel=0.2)
    models = {model["name"]: model for model in measurement["models"]}
    assert models["classify"]["requests_per_s"] == pytest.approx(rate, rel=0.2)
    assert gateway["requests_per_s"] == pytest.approx(rate, rel=0.2)
    assert gateway["p99_ms"] > 0
    assert {row["name"]: row["expected_share"] for row in route["variants"]} == {"v1": 0.75, "v2": 0.25}
    assert sum(row["share"] for row in route["variants"]) == pytest.approx(1)
    assert all(row["p50_ms"] <= row["p99_ms"] for row in route["variants"])
    assert [row["errors_per_s"] for row in route["variants"]] == [0, 0]
    assert measurement["server"]["ready"] is True
    assert models["classify_v1"]["instances"] == len(served.stubs("classify_v1"))
    names = {process["name"]: process["memory_bytes"] for process in measurement["processes"]}
    assert {*names} == {"supervisor", "tritonserver", "gateway", "classify", "classify_v1", "classify_v2"}
    assert min(names.values()) > 2**20
    tables = served.run("top", "--once", "--interval", "1").stdout
    assert (tables.startswith("ready  up "), "\x1b" in tables) == (True, False)
    assert re.search(r"^classify v1 +75 %", tables, re.MULTILINE)


@cases("key", q=b"q", Ctrl_C=b"\x03")
def test_live_view_ends_and_restores_the_terminal(served, load, key):
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    output = bytearray()

    def read() -> bytes:
        while select.select([ours], [], [], 0)[0]:
            output.extend(os.read(ours, 2**16))
        return bytes(output)

    # `setsid` makes it the terminal of the process, so that Ctrl-C is a signal. `pty.fork` could hang: it
    # runs Python between fork and exec, while threads of gRPC hold locks.
    words = ["setsid", "--ctty", NEREID, "top", "--interval", "0.5"]
    environment = served.environment | {"TERM": "xterm-256color"}
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        try:
            wait_until(lambda: b"q quits" in read() or process.poll() is not None, "a frame")
            os.write(ours, key)
            # The process waits until its output is read.
            wait_until(lambda: read() and process.poll() is not None, "the end")
        finally:
            process.kill()

    flags, shown = termios.tcgetattr(ours)[3], ESCAPES.sub("", output.decode())
    for descriptor in (ours, theirs):
        os.close(descriptor)
    assert process.returncode == 0, shown[-2000:]
    assert bool(flags & termios.ECHO and flags & termios.ICANON)
    assert [part for part in ("ready  up ", "classify_v2", "gateway") if part not in shown] == []

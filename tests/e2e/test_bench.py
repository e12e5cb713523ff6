"""`python -m loadtest.bench` as a user runs it: short runs on the real server."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from loadtest import wrk
from loadtest.bench.plan import BATCHES, PATHS
from tests.commands import captured
from tests.routes import wait_until

WATCHDOG_S = 300
BENCH = (sys.executable, "-m", "loadtest.bench")
SHORT = ("--rounds", "1", "--seconds", "1", "--photos", "small", "--json")

pytestmark = [
    pytest.mark.nightly(minutes=1),
    pytest.mark.skipif(not wrk.is_installed(), reason="needs wrk; fix: apt-get install wrk"),
]


def bench(*words: str) -> dict:
    done = captured([*BENCH, *SHORT, *words], timeout=WATCHDOG_S)
    # How fast this machine is decides between 0 and 1.
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_every_path_over_http_has_sane_numbers():
    result = bench("--concurrency", "32")

    rows = {row["path"]: row for row in result["rows"] if row["precision"] == "fp32"}
    assert set(rows) == {"in process", BATCHES, *PATHS}
    assert rows["gateway"]["memory_mb"]["median"] > rows["route"]["memory_mb"]["median"]
    for row in rows.values():
        assert 0 < row["p50_ms"]["median"] <= row["p90_ms"]["median"] <= row["p99_ms"]["median"]
        assert 1 < row["cpu_ms"]["median"] < 1000
        assert 50 < row["memory_mb"]["median"] < 4000
        assert row["rate"]["median"] > 1
    assert rows["cpu"]["cpu_of_limit"]["median"] > 0.5
    assert [target["what"].split(":")[0] for target in result["targets"]] == [
        *["ensemble, small, concurrency 32"],
        *["cpu, small, concurrency 32"] * 7,
    ]
    assert result["command"].startswith("python -m loadtest.bench --rounds 1")


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_run_leaves_no_process(kind, tmp_path):
    """Ctrl-C reaches every process of the terminal, another signal the command alone: all end soon."""
    words = ["--paths", "gateway", "--concurrency", "32", "--rounds", "9"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*BENCH, *SHORT, *words], stdout=log, stderr=log, process_group=0)
    started = wait_until(lambda: under_load(process.pid), "load")

    os.killpg(process.pid, kind) if kind == signal.SIGINT else process.send_signal(kind)

    process.wait(60)
    _, alive = psutil.wait_procs(started, 30)
    assert alive == []


def under_load(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    try:
        return children if "wrk" in [child.name() for child in children] else []
    except psutil.NoSuchProcess:
        return []

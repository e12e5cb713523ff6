"""The load tests against the real server; Locust runs in processes of its own, as it changes its own."""

import contextlib
import json
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from loadtest import load
from nereid.base.assets import CHELSEA, COFFEE, REPOSITORY
from nereid.server.ports import free_ports
from tests.commands import captured
from tests.routes import wait_until
from tests.tables import cases

CALLERS = 6


@pytest.fixture(scope="session")
def target(fused) -> load.Target:
    ports = fused.options.ports
    return f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}"


def rows(path: Path) -> dict[str, dict]:
    return {row["protocol"]: row for row in json.loads(path.read_text())["rows"]}


def test_closed_loop_asks_over_both_protocols_at_once(target, tmp_path):
    """No answer is wrong, and callers overlap: a call of gRPC that blocked all would leave one in flight."""
    report = tmp_path / "report.json"
    pasted = f"{target[0]}/", target[1]  # as browsers give an URL

    code = load.run_locust(pasted, 2.0, report, ["--users", str(CALLERS), "--thresholds="])

    table = rows(report)
    assert code == 0
    assert {name: row["failures"] for name, row in table.items()} == {"grpc": {}, "http": {}}
    assert {row["in_flight_max"] for row in table.values()} == {CALLERS // 2}


def two_processes() -> list[str]:
    (port,) = free_ports(1)
    alone = ["--processes", "2", "--master-bind-host", "127.0.0.1"]
    return [*alone, "--master-bind-port", str(port), "--master-port", str(port)]


def asking(report: Path, server: load.Target) -> list[psutil.Process]:
    ports = {int(address.rpartition(":")[2]) for address in server}
    processes = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if str(report) in process.cmdline() and any(
                at.raddr and at.raddr.port in ports for at in process.net_connections()
            ):
                processes.append(process)
    return processes


@cases(("number", "code"), killed=(signal.SIGKILL, 128 + signal.SIGKILL), told=(signal.SIGTERM, 1))
def test_a_run_that_is_cut_short_fails(target, tmp_path, number, code):
    """What it would have sent was never asked, however good the answers until then."""
    report, words = tmp_path / "report.json", ["--scenario", "open", "--users", "8", "--thresholds="]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(load.run_locust, target, 5.0, report, words)
        (locust,) = wait_until(lambda: asking(report, target), "the requests")
        locust.send_signal(number)

    assert running.result() == code


@pytest.mark.nightly(minutes=1)
def test_open_loop_over_two_processes_is_one_report(target, tmp_path, monkeypatch):
    """The rate is shared out, and the master has the sum of what the workers counted.

    A master that does not wait for its workers' users must not start a schedule without callers.
    """
    monkeypatch.setenv("LOCUST_WAIT_FOR_WORKERS_REPORT_AFTER_RAMP_UP", "0")
    report = tmp_path / "report.json"
    words = ["--scenario", "open", "--arrivals", "fixed", "--rate", "20", "--users", "24", "--thresholds="]

    code = load.run_locust(target, 5.0, report, [*two_processes(), *words])

    table, whole = rows(report), json.loads(report.read_text())
    assert code == 0
    assert (whole["processes"], whole["lost"]) == (2, 0)
    assert [row["failures"] for row in table.values()] == [{}, {}]
    # Both workers' whole rate would be 40, one's share 10; one that begins later has less of its share.
    assert sum(row["target_per_s"] for row in table.values()) == pytest.approx(20, abs=5)
    sent = json.loads(report.with_suffix(".locust.json").read_text())
    assert sum(entry["num_requests"] for entry in sent) == sum(row["requests"] for row in table.values())


def test_own_photos_have_the_class_of_their_folder(target, tmp_path):
    """The name is a label or an index; photos without a sub-folder are not checked."""
    photos, report = tmp_path / "photos", tmp_path / "report.json"
    for name in ("espresso", "967", "Egyptian cat", "."):
        (photos / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(CHELSEA if name == "." else COFFEE, photos / name)

    # Locust's time begins before the photos are read, which takes seconds on a busy machine.
    code = load.run_locust(target, 8.0, report, ["--users", "2", "--images", str(photos)])

    failures = [reason for row in rows(report).values() for reason in row["failures"]]
    assert (code, {*failures}) == (1, {"wrong result: expected 285, got 967"})
    assert all(row["rate_per_s"] > 0 for row in rows(report).values())
    sent = json.loads(report.with_suffix(".locust.json").read_text())
    assert {entry["name"] for entry in sent} == {"classify own photos"}


def test_wrong_photos_are_told_before_anything_is_asked(target, tmp_path, capfd):
    photos, report = tmp_path / "photos", tmp_path / "report.json"
    (photos / "My cat").mkdir(parents=True)
    shutil.copy(CHELSEA, photos / "My cat")

    code = load.run_locust(target, 60.0, report, ["--users", "2", "--images", str(photos)])

    assert code == 1
    assert "'My cat' is not a class of the model; expected a label such as 'tench'" in capfd.readouterr().err
    assert sum(row["requests"] for row in rows(report).values()) == 0


@cases(
    asked_wrongly=(["--bogus"], "", 2),
    killed=(["-f", "mine.py"], "import os\nos.kill(os.getpid(), 9)", 128 + signal.SIGKILL),
    ended_early=(["-f", "mine.py"], "raise SystemExit(0)", 1),
)
def test_locust_that_leaves_no_report_gives_its_code(words, locustfile, code, tmp_path, monkeypatch):
    """As documented, and without a second loop; no report is no good end, whatever Locust says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY.parent))
    Path("mine.py").write_text(locustfile)

    command = [sys.executable, "-m", "loadtest.load", "--seconds", "3", "--url", "http://127.0.0.1:1"]
    done = captured([*command, "--", *words], timeout=240)

    assert (done.returncode, done.stderr.splitlines()[-1]) == (code, "the load test failed; see above")

"""The GPU check without a GPU: a hang, a crash or the end of the run costs one section and no result."""

import json
import os
import subprocess
import sys

import pytest

from loadtest.gpu_check import __main__ as check
from loadtest.gpu_check import claims
from tests.conftest import ROOT
from tests.tables import cases

pytestmark = pytest.mark.process
FIRST, SECOND = "machine", "speed"
# The name of the section is the first argument; its results are in a file of the working folder.
WRITES = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{\"found\": 1}'); "
# Ignores SIGTERM, as a thread that hangs in CUDA does.
HANGS = WRITES + "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
CRASHES = (
    WRITES + f"import os, signal; print('last words at {ROOT}/a.py', flush=True); os.kill(os.getpid(), 11)"
)
FAILS = "raise SystemExit('CUDA error 999')"


@pytest.fixture
def plan(tmp_path):
    """Build a run of two sections whose processes run the given programs."""

    def build(*programs: str, limit_s: float = 60.0, earlier=()) -> check.Plan:
        by_name = dict(zip((FIRST, SECOND), programs, strict=False))
        return check.Plan(
            sections=dict.fromkeys(by_name, 3.0),
            limit_s=limit_s,
            folder=tmp_path,
            target=tmp_path / "gpu_check.json",
            header={"commit": "abc"},
            command=lambda name, _: [sys.executable, "-c", by_name[name], str(tmp_path / f"{name}.json")],
            environment=os.environ,
            stop_s=0.5,
            earlier=dict(earlier),
        )

    return build


@cases(
    ("program", "status", "reason", "results"),
    {
        "done": (WRITES, "done", "", {"found": 1}),
        "hang": (HANGS, "timed out", "not done after 3 s", {"found": 1}),
        "crash": (CRASHES, "crashed", "SIGSEGV; its output ends: last words at a.py", {"found": 1}),
        "failure": (FAILS, "failed", "CUDA error 999", {}),
    },
)
def test_a_bad_section_is_recorded_and_the_next_one_runs(plan, tmp_path, program, status, reason, results):
    """Its reason and results so far are on the disk when the next section begins, which is done."""
    seen = []

    def look(line: str) -> None:
        if line.startswith(SECOND):
            seen.append(json.loads((tmp_path / "gpu_check.json").read_text())["sections"])

    document = check.run(plan(program, WRITES, earlier={"memory": {"status": "done"}}), look)

    first, second = seen[0][FIRST], document["sections"][SECOND]
    assert (first["status"], first["results"]) == (status, results)
    assert reason in first["reason"]
    assert seen[0][SECOND]["status"] == "not reached"
    assert (second["status"], second["results"], second["commit"]) == ("done", {"found": 1}, "abc")
    assert [*document["sections"]] == [FIRST, SECOND, "memory"]
    assert (status == "done") == (check.unfinished(document) == [])


@pytest.mark.skipif(check.DRIVER.exists(), reason="needs a machine without an NVIDIA GPU")
def test_without_a_gpu_nothing_is_recorded(tmp_path):
    words = [sys.executable, "-m", "loadtest.gpu_check", "--folder", str(tmp_path), "--record", "gpu_check"]

    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    dry = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True)

    assert (done.returncode, done.stderr.strip()) == (1, check.NO_GPU)
    assert (dry.returncode, dry.stderr) == (0, "")
    assert "missing: nvidia-smi; fix: " in dry.stdout
    assert [*tmp_path.iterdir()] == []


@cases(
    ("target", "value", "expected"),
    {
        "at most": ("≤ 3", 3.0, True),
        "more": ("≤ 3", 3.1, False),
        "less": ("≥ 0.8", 0.79, False),
        "false": ("= True", False, False),
        "error": ("≤ 0.01", "RuntimeError: CUDA error 700", False),
        "passed": (claims.NO_FAILURE, "3 passed, 0 failed, 1 skipped", True),
        "failed": (claims.NO_FAILURE, "1 failed, 10 passed in 4.51s", False),
        "error in tests": (claims.NO_FAILURE, "3 passed, 1 error in 4.51s", False),
        "all skipped": (claims.NO_FAILURE, "9 skipped in 1.00s", False),
        "stopped": (claims.NO_FAILURE, "3 passed, 0 failed, 0 skipped, stopped: why", False),
    },
)
def test_targets_are_compared(target, value, expected):
    assert claims.holds(target, value) is expected


def test_claims_have_results_and_quotients():
    sections = {
        "served": {"status": "timed out", "results": {"best_per_s": 850.0, "alone_p50_ms": 4.5}},
        "speed": {"status": "done", "results": {"slower_step_per_s": 1000.0}},
    }

    found = claims.rows(sections)
    results = [row["result"] for row in found if row["section"] == "served"]

    assert results == ["4.5 (missed)", "850.0", "0.85", "not run yet: timed out", "not run yet: timed out"]
    assert len(claims.missed(found)) == 1

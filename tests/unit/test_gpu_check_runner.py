"""The runner of the GPU check: a hang, a crash or the end of the run costs one section and no result."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.gpu_check import runner
from loadtest.gpu_check.__main__ import DRIVER, NO_GPU
from loadtest.gpu_check.sections import BY_NAME, SECTIONS, Part, select
from tests.conftest import ROOT

FIRST, SECOND = "machine", "speed"
WRITES = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('{\"found\": 1}'); "
# Ignores SIGTERM, as a thread that hangs in CUDA does, and has a child in a session of its own.
HANGS = WRITES + textwrap.dedent("""
    import signal, subprocess, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print("child", child.pid, flush=True)
    time.sleep(60)
""")
CRASHES = WRITES + "import os, signal; print('last words', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
FAILS = "raise SystemExit('CUDA error 999')"
STOP_S = 0.5


@pytest.fixture
def plan(tmp_path):
    """Build a run of two sections whose processes run the given programs."""

    def build(*programs: str, limit_s: float = 60.0, section_s: float = 3.0, needed=()) -> runner.Plan:
        names = [FIRST, SECOND][: len(programs)]
        sections = [replace(BY_NAME[name], limit_s=section_s, needed=(), useful=()) for name in names]
        sections[0] = replace(sections[0], needed=needed)
        by_name = dict(zip(names, programs, strict=True))
        return runner.Plan(
            sections=sections,
            limit_s=limit_s,
            folder=tmp_path,
            targets=[tmp_path / "gpu_check.json"],
            header={"commit": "abc"},
            command=lambda name, file, seconds: [sys.executable, "-c", by_name[name], str(file)],
            environment=os.environ,
            stop_s=STOP_S,
        )

    return build


def is_alive(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("program", "status", "reason", "results"),
    [
        (WRITES, "done", "", {"found": 1}),
        (HANGS, "timed out", "not done after 3 s", {"found": 1}),
        (CRASHES, "crashed", "SIGSEGV; its output ends: last words", {"found": 1}),
        (FAILS, "failed", "CUDA error 999", {}),
    ],
    ids=["done", "hang", "crash", "failure"],
)
def test_a_bad_section_is_recorded_and_the_next_one_runs(plan, program, status, reason, results):
    """The status has its reason, the results so far stay, and the second section is done."""
    document = runner.run(plan(program, WRITES), show=lambda line: None)

    first, second = document["sections"][FIRST], document["sections"][SECOND]
    assert (first["status"], first["results"]) == (status, results)
    assert reason in first["reason"]
    assert (second["status"], second["results"]) == ("done", {"found": 1})
    assert (status == "done") == (runner.unfinished(document) == [])


def test_a_hang_leaves_no_process(plan, tmp_path):
    """The time limit holds, and also ends a child in a session of its own."""
    begin_s = time.monotonic()

    runner.run(plan(HANGS), show=lambda line: None)

    assert time.monotonic() - begin_s < 15.0
    (line,) = (tmp_path / f"1-{FIRST}.log").read_text().splitlines()
    child, deadline_s = int(line.removeprefix("child ")), time.monotonic() + 5.0
    while is_alive(child) and time.monotonic() < deadline_s:  # a signal takes effect a moment later
        time.sleep(0.02)
    assert not is_alive(child)


def test_results_are_on_the_disk_after_each_section(plan, tmp_path):
    """When the second section begins, the file has the results of the first."""
    seen = []

    def look(line: str) -> None:
        if line.startswith("2."):
            seen.append(runner.read(tmp_path / "gpu_check.json")["sections"])

    runner.run(plan(WRITES, WRITES), show=look)

    (sections,) = seen
    assert sections[FIRST]["results"] == {"found": 1}
    assert sections[SECOND]["status"] == "not reached"


def test_a_run_that_is_killed_keeps_its_results(tmp_path):
    """SIGKILL in the second section: the file is whole and has the first one."""
    program = f"""
import os, sys
from pathlib import Path
from dataclasses import replace
from loadtest.gpu_check import runner
from loadtest.gpu_check.sections import BY_NAME
folder = Path({str(tmp_path)!r})
programs = {{"machine": {WRITES!r}, "speed": {HANGS!r}}}
sections = [replace(BY_NAME[name], limit_s=30, needed=(), useful=()) for name in programs]
command = lambda name, file, seconds: [sys.executable, "-c", programs[name], str(file)]
runner.run(runner.Plan(sections, 60, folder, [folder / "gpu_check.json"], {{}}, command, os.environ))
"""
    log = tmp_path / f"2-{SECOND}.log"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 20
        while not (log.exists() and "child" in log.read_text()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        hanging = runner_children(process.pid)
        process.kill()
    child = int(log.read_text().split()[1])
    for pid in (*hanging, child):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)

    sections = runner.read(tmp_path / "gpu_check.json")["sections"]
    assert (sections[FIRST]["status"], sections[FIRST]["results"]) == ("done", {"found": 1})
    assert sections[SECOND]["status"] == "not reached"


def runner_children(pid: int) -> list[int]:
    """Return the children of a process."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_a_section_without_time_is_not_begun(plan):
    """The limit of the run counts: a section that would have too little time is not reached."""
    document = runner.run(plan(HANGS, WRITES, limit_s=3.2), show=lambda line: None)

    assert document["sections"][FIRST]["status"] == "timed out"
    assert document["sections"][SECOND]["status"] == "not reached"
    assert "of the run were left" in document["sections"][SECOND]["reason"]


def test_a_missing_part_is_named_with_its_fix(plan):
    """The section does not run, and the next one does."""
    part = Part("no_such_module", "pip install it")

    document = runner.run(plan(WRITES, WRITES, needed=(part,)), show=lambda line: None)

    first = document["sections"][FIRST]
    assert (first["status"], first["reason"]) == ("missing parts", "no_such_module; fix: pip install it")
    assert document["sections"][SECOND]["status"] == "done"


def test_a_failing_section_keeps_what_it_found(tmp_path):
    """An exception after the first result: the file has both."""

    def findings():
        yield {"found": 1}
        raise RuntimeError("CUDA error 700")

    code = runner.run_in_this_process(findings(), tmp_path / "file.json")

    assert (code, runner.read(tmp_path / "file.json")) == (
        1,
        {"found": 1, "error": "RuntimeError: CUDA error 700"},
    )


def test_time_limits_fit_into_ten_minutes():
    """All sections together take less than ten minutes, even if every one reaches its limit."""
    assert sum(section.limit_s for section in SECTIONS) <= 590


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("", [section.name for section in SECTIONS]),
        ("4,1", ["machine", "server"]),
        ("memory, 2", ["speed", "memory"]),
    ],
    ids=["all", "numbers", "both"],
)
def test_sections_are_selected_in_their_order(words, names):
    """Numbers and names select, in the order of the run."""
    assert [section.name for section in select(words)] == names


def test_unknown_section_is_rejected():
    """The message lists the sections."""
    with pytest.raises(ValueError, match=r"expected some of 1 \(machine\), .* got 'ten'"):
        select("1,ten")


@pytest.mark.skipif(DRIVER.exists(), reason="needs a machine without an NVIDIA GPU")
def test_without_a_gpu_nothing_is_recorded(tmp_path):
    """The exit status is 1, the reason is on stderr, and no file is written."""
    words = [sys.executable, "-m", "loadtest.gpu_check", "--folder", str(tmp_path), "--record", "gpu_check"]
    before = sorted((ROOT / "loadtest" / "results").iterdir())

    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)

    assert (done.returncode, done.stderr.strip()) == (1, NO_GPU)
    assert [*tmp_path.iterdir()] == []
    assert sorted((ROOT / "loadtest" / "results").iterdir()) == before


def dry_run(folder: Path, *words: str) -> dict:
    """Run the dry run; returns its results."""
    command = [sys.executable, "-m", "loadtest.gpu_check", "--dry-run", "--folder", str(folder), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {**runner.read(folder / "dry_run.json"), "output": done.stdout}


def test_dry_run_shows_the_plan_and_claims_nothing(tmp_path):
    """Sections without a server: each says what it would run, and no claim has a result."""
    document = dry_run(tmp_path, "--sections", "machine,decoder,zero_copy,speed")

    sections = document["sections"]
    assert {each["status"] for each in sections.values()} == {"done"}
    assert (document["is_dry_run"], document["claims"]) == (True, [])
    assert "would trace batches from JPEG to scores" in document["output"]
    assert sections["zero_copy"]["results"]["instances"]["efficientnet_lite0"] == ["KIND_GPU"]
    assert not (tmp_path / "gpu_check.json").exists()


@pytest.mark.slow
def test_dry_run_of_all_sections(tmp_path):
    """Every section's steps without a GPU pass, those with a server on the CPU, too."""
    sections = dry_run(tmp_path)["sections"]

    assert {name: each["status"] for name, each in sections.items()} == dict.fromkeys(BY_NAME, "done")
    assert sections["server"]["results"]["classes"] == ["espresso"]
    assert sections["memory"]["results"]["after_load"] == "espresso"
    assert sections["kernel"]["results"]["cpu_path_against_pillow"]["worst_mean"] <= 0.6
    assert sections["precisions"]["results"]["FP16"]["max_difference"] <= 0.02

"""Limits of control groups, read from files like those of the kernel."""

import os
from math import inf
from pathlib import Path

from nereid.base.control_groups import ControlGroups
from nereid.base.processes import MemoryKills, ProcessRefusals, available_bytes, available_cores
from tests.tables import cases

MEMINFO = "MemTotal: 9000 kB\nMemAvailable:    1000 kB\n"
LIMIT_1, USED_1 = "memory/a/memory.limit_in_bytes", "memory/a/memory.usage_in_bytes"
CORES = len(os.sched_getaffinity(0))


def groups(folder: Path, membership: str, files: dict[str, str]) -> ControlGroups:
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "membership").write_text(membership)
    return ControlGroups(folder / "groups", folder / "membership")


def version_1(quota: str) -> dict[str, str]:
    return {"cpu/a/cpu.cfs_quota_us": f"{quota}\n", "cpu/a/cpu.cfs_period_us": "100000\n"}


@cases(
    ("content", "expected"),
    {
        "half a core": ("50000 100000\n", 1),
        "a core and a half": ("150000 100000\n", 2),
        "more than there are": ("9900000 100000\n", CORES),
        "no quota": ("max 100000\n", CORES),
    },
)
def test_quota_limits_the_cores(tmp_path, content, expected):
    assert available_cores(groups(tmp_path, "0::/\n", {"cpu.max": content})) == min(CORES, expected)


@cases(
    ("membership", "files", "expected"),
    {
        "own group, version 2": ("0::/a/b\n", {"a/b/cpu.max": "50000 100000", "cpu.max": "max 100000"}, 0.5),
        "group around it": ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "70000 100000"}, 0.7),
        "another's group": ("0::/a/b\n", {"c/cpu.max": "50000 100000"}, inf),
        "name outside the container": ("0::/a/b\n", {"cpu.max": "50000 100000"}, 0.5),
        "version 1": ("1:cpu,cpuacct:/a\n", version_1("200000"), 2.0),
        "version 1 without a quota": ("1:cpu:/a\n", version_1("-1"), inf),
        "no control groups": ("", {}, inf),
    },
)
def test_quota_of_each_enclosing_group_counts(tmp_path, membership, files, expected):
    assert groups(tmp_path, membership, files).cores() == expected


@cases(
    ("membership", "files", "left"),
    {
        "version 2": ("0::/a\n", {"a/memory.max": "5000", "a/memory.current": "1000"}, 4000),
        "more used than allowed": ("0::/a\n", {"a/memory.max": "5000", "a/memory.current": "6000"}, 0),
        "without a limit": ("0::/a\n", {"a/memory.max": "max", "a/memory.current": "1000"}, 1_024_000),
        "version 1": ("4:memory:/a\n", {LIMIT_1: "5000", USED_1: "4000"}, 1000),
        "version 1 without a limit": ("4:memory:/a\n", {LIMIT_1: str(2**63 - 4096), USED_1: "1"}, 1_024_000),
    },
)
def test_memory_is_what_the_groups_leave(tmp_path, membership, files, left):
    (tmp_path / "meminfo").write_text(MEMINFO)

    assert available_bytes(tmp_path / "meminfo", groups(tmp_path, membership, files)) == left


@cases(
    ("membership", "limits", "name", "text"),
    {
        "version 2": (
            "0::/a\n",
            {"a/memory.max": "350000000", "a/memory.current": "1"},
            "a/memory.events",
            "low 0\nmax 9\noom 1\noom_kill {}\noom_group_kill 0\n",
        ),
        "version 1": (
            "4:memory:/a\n",
            {LIMIT_1: "350000000", USED_1: "1"},
            "memory/a/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n",
        ),
    },
)
def test_kills_for_lack_of_memory_are_described(tmp_path, membership, limits, name, text):
    kills = MemoryKills(groups(tmp_path, membership, {name: text.format(3)} | limits))

    assert kills.new() == ""
    groups(tmp_path, membership, {name: text.format(5)})
    assert kills.new() == (
        "lack of memory: the kernel ended 2 process(es) of this control group; the limit is 350 MB; "
        "fix: a higher limit, or fewer instances (count in config.pbtxt)"
    )
    assert kills.new() == ""


@cases(
    ("membership", "folders", "limit"),
    {
        "version 2": ("0::/a/b\n", ("a/b", "a"), "260"),
        "version 1": ("8:pids:/a/b\n", ("pids/a/b", "pids/a"), "260"),
        "without a limit": ("0::/a\n", ("a",), "max"),
    },
)
def test_refused_processes_are_described(tmp_path, membership, folders, limit):
    """A group around the own one may have the limit."""
    events = {f"{folder}/pids.events": "max 3\n" for folder in folders}
    limits = {f"{folders[-1]}/pids.max": limit, f"{folders[0]}/pids.current": "1"}
    refusals = ProcessRefusals(groups(tmp_path, membership, events | limits))

    assert refusals.new() == ""
    groups(tmp_path, membership, {f"{folders[0]}/pids.events": "max 5\n"})
    assert refusals.new() == (
        "lack of processes: the kernel refused 2 process(es) or thread(s) of this control group; the limit "
        f"is {limit.replace('max', 'inf')}; fix: a higher limit (pids.max, TasksMax=, or --pids-limit)"
    )
    assert refusals.new() == ""


def test_kills_are_unknown_without_control_groups(tmp_path):
    assert MemoryKills(ControlGroups(tmp_path, tmp_path / "none")).new() == ""
    (tmp_path / "memory.events").write_text("low 0\noom 1\n")
    (tmp_path / "membership").write_text("0::/\n")
    assert MemoryKills(ControlGroups(tmp_path, tmp_path / "membership")).new() == ""

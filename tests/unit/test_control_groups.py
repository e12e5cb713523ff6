"""Limits of control groups, read from files like those of the kernel."""

import os
from math import inf
from pathlib import Path

import pytest

from nereid.control_groups import ControlGroups
from nereid.processes import MemoryKills, available_bytes, available_cores
from tests.tables import cases

MEMINFO = "MemTotal: 9000 kB\nMemAvailable:    1000 kB\n"
CORES = len(os.sched_getaffinity(0))


def groups(folder: Path, membership: str, files: dict[str, str]) -> ControlGroups:
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "membership").write_text(membership)
    return ControlGroups(folder / "groups", folder / "membership")


@cases(
    ("content", "expected"),
    {
        "one core": ("100000 100000\n", 1),
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
        "version 1": (
            "1:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "200000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            2.0,
        ),
        "version 1 without a quota": (
            "1:cpu:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            inf,
        ),
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
        "version 1": (
            "4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": "5000", "memory/a/memory.usage_in_bytes": "4000"},
            1000,
        ),
        "version 1 without a limit": (
            "4:memory:/a\n",
            {"memory/a/memory.limit_in_bytes": "9223372036854771712", "memory/a/memory.usage_in_bytes": "1"},
            1_024_000,
        ),
    },
)
def test_memory_is_what_the_groups_leave(tmp_path, membership, files, left):
    (tmp_path / "meminfo").write_text(MEMINFO)

    assert available_bytes(tmp_path / "meminfo", groups(tmp_path, membership, files)) == left


@pytest.mark.parametrize(
    ("membership", "name", "text"),
    [
        ("0::/a\n", "a/memory.events", "low 0\nmax 9\noom 1\noom_kill {}\noom_group_kill 0\n"),
        ("4:memory:/a\n", "memory/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
    ],
    ids=["version 2", "version 1"],
)
def test_kills_for_lack_of_memory_are_described(tmp_path, membership, name, text):
    folder = Path(name).parent
    limits = {f"{folder}/memory.max": "350000000", f"{folder}/memory.current": "1"}
    if "oom_control" in name:
        limits = {f"{folder}/memory.limit_in_bytes": "350000000", f"{folder}/memory.usage_in_bytes": "1"}
    own = groups(tmp_path, membership, {name: text.format(3)} | limits)
    kills = MemoryKills(own)

    assert kills.new() == ""
    groups(tmp_path, membership, {name: text.format(5)})
    assert kills.new() == (
        "lack of memory: the kernel ended 2 process(es) of this control group; the limit is 350 MB; "
        "fix: a higher limit, or fewer instances (count in config.pbtxt)"
    )
    assert kills.new() == ""


def test_kills_are_unknown_without_control_groups(tmp_path):
    assert MemoryKills(ControlGroups(tmp_path, tmp_path / "none")).new() == ""
    (tmp_path / "memory.events").write_text("low 0\noom 1\n")
    (tmp_path / "membership").write_text("0::/\n")
    assert MemoryKills(ControlGroups(tmp_path, tmp_path / "membership")).new() == ""

"""Bundles for machines without a network: sizes, choices, requirements of the target, parts and sums."""

import os
import shutil

import pytest
from pip._vendor.packaging.requirements import Requirement

from nereid.base.errors import OperationFailed, WrongUsage
from tests.commands import captured
from tests.offline_bundles import write_wheel
from tools import offline_bundle
from tools.wheel_closure import Closure, close, read_wheel, read_wheels, target_environment

MIB = 2**20


def test_sizes_have_binary_units():
    sizes = {"1024K": MIB, "2G": 2048 * MIB, str(MIB): MIB}

    assert {text: offline_bundle.parse_size(text) for text in sizes} == sizes
    for text in ("", "60MB", "-1M", "1023K", "٣M"):
        with pytest.raises(WrongUsage, match=r"expected at least 1M, got .*; fix: make offline PART="):
            offline_bundle.parse_size(text)


def test_python_is_a_version_or_an_interpreter():
    assert [offline_bundle.parse_python(text) for text in ("3.12", "/usr/bin/python3.12")] == ["3.12"] * 2
    for text in ("3.10", "python"):
        with pytest.raises(WrongUsage, match=r"expected 3\.11 or 3\.12, got"):
            offline_bundle.parse_python(text)


@pytest.mark.parametrize(("text", "reason"), [("cpu,gpus", "got gpus"), ("gpu13,cpu", "got cpu and gpu13")])
def test_impossible_extras_are_rejected(text, reason):
    """An unknown extra, which pip only warns about, and two that exclude each other are errors."""
    with pytest.raises(WrongUsage, match=reason):
        offline_bundle.parse_extras(text, frozenset({"cpu", "gpu", "gpu13", "load"}))


def test_target_needs_what_its_own_markers_select(tmp_path):
    requirements = [
        'Requires-Dist: Old_Only; python_version < "3.12"',
        'Requires-Dist: new-only>=2; python_version >= "3.12"',
        'Requires-Dist: windows-only; sys_platform == "win32"',
        'Requires-Dist: leaf[more]; extra == "cpu"',
        'Requires-Dist: absent; extra == "load"',
        "Provides-Extra: cpu",
    ]
    write_wheel(tmp_path, "top", "1.0", requirements)
    write_wheel(tmp_path, "old-only", "1.0")
    write_wheel(tmp_path, "new-only", "1.0")
    more = ['Requires-Dist: bud[x]!=3; extra == "more"', "Provides-Extra: more"]
    write_wheel(tmp_path, "leaf", "1.0", more)
    wheels, requested = read_wheels(tmp_path), [Requirement("top[cpu]")]

    assert {python: close(wheels, requested, target_environment(python)) for python in ("3.11", "3.12")} == {
        "3.11": Closure(frozenset({"top", "leaf", "old-only"}), ("bud[x]!=3",)),
        "3.12": Closure(frozenset({"top", "leaf"}), ("bud[x]!=3", "new-only>=2")),
    }


@pytest.fixture
def index(tmp_path):
    (folder := tmp_path / "index").mkdir()
    requirements = [
        'Requires-Dist: old-only; python_version < "3.12"',
        'Requires-Dist: new-only; python_version >= "3.12"',
    ]
    write_wheel(folder, "top", "1.0", requirements)
    for name in ("old-only", "new-only", "pip"):
        write_wheel(folder, name, "1.0")
    return folder


def collect(index, folder, passes, lacking=""):
    """Collect wheels for Python 3.12 with a pip that runs on Python 3.11."""

    def download(requirements, python, into):
        into.mkdir()
        passes.append([requirement.rpartition("/")[2] for requirement in requirements])
        names = {name.removesuffix("-1.0-py3-none-any.whl") for name in passes[-1]} | {"old_only"}
        for name in names - {lacking}:
            path = next(index.glob(f"{name.replace('-', '_')}-*"))
            (into / path.name).write_bytes(path.read_bytes())

    return offline_bundle.collect(read_wheel(next(index.glob("top-*"))), [], "3.12", folder, download)


def test_wheels_are_those_of_the_target(index, tmp_path):
    assert sorted(collect(index, tmp_path, passes := [])) == ["new-only", "pip", "top"]
    assert passes == [[top := "top-1.0-py3-none-any.whl", "pip"], [top, "pip", "new-only"]]


def test_incomplete_bundle_is_an_error(index, tmp_path):
    with pytest.raises(OperationFailed, match="expected wheels for new-only, got none"):
        collect(index, tmp_path, passes := [], lacking="new-only")

    assert len(passes) == offline_bundle.MAX_PASSES


@pytest.fixture
def wheels(tmp_path):
    (folder := tmp_path / "wheels").mkdir()
    contents = {"b.whl": bytes(range(256)) * 12_000, "a.whl": b"small"}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def write(wheels, folder, part_bytes=MIB):
    folder.mkdir(exist_ok=True)
    return offline_bundle.write_bundle("nereid-offline-x", wheels, "top==1.0\n", folder, part_bytes)


def test_same_wheels_give_the_same_bundle(wheels, tmp_path):
    first, second = write(wheels, tmp_path / "first"), write(wheels[::-1], tmp_path / "second")

    assert [part.read_bytes() for part in first] == [part.read_bytes() for part in second]


def test_new_bundle_replaces_the_old_one(wheels, tmp_path):
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "notes.txt").touch()
    write(wheels, tmp_path / "bundle")

    parts = write(wheels, tmp_path / "bundle", part_bytes=2 * MIB)

    kept = {path.name for path in (tmp_path / "bundle").iterdir()}
    assert kept == {"SHA256SUMS", "install-offline.sh", "notes.txt", *(part.name for part in parts)}
    assert len(parts) == 2


def test_bundle_is_built_for_the_target_with_the_python_that_is_here(root, tmp_path):
    shutil.copy(root / "Makefile", tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (program := tmp_path / ".venv" / "bin" / "python").write_text('#!/bin/sh\necho "$*"\n')
    program.chmod(0o755)
    # `make check` gives its own variables to this test.
    kept = (name for name in os.environ if not name.startswith(("MAKE", "PYTHON", "EXTRAS", "PART")))

    words = ["make", "offline", "EXTRAS=embedded,gpu13", "PYTHON=3.12", "PART=60M"]
    done = captured(words, cwd=tmp_path, env={name: os.environ[name] for name in kept})

    words = "-m tools.offline_bundle --extras embedded,gpu13 --part 60M --python 3.12"
    assert (done.stdout.splitlines(), done.returncode) == ([words], 0), done.stderr

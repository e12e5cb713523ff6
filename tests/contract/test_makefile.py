"""Targets of the Makefile that are more than a list of commands."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

# Notes how it was called; everything but a test misses its target.
FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >> calls
case "$0" in *pytest) exit 0;; esac
exit 1
"""


@pytest.fixture
def made(root, tmp_path):
    """Return what `make` calls for a target, where all is set up and every measurement misses its target."""
    shutil.copy(root / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for stamp in (".serving", ".testing"):
        (tmp_path / ".venv" / stamp).touch()
    for name in ("python", "nereid", "pytest"):
        (program := tmp_path / ".venv" / "bin" / name).write_text(FAKE)
        program.chmod(0o755)

    def make(*words: str, folder: Path = tmp_path) -> list[str]:
        # `make check` gives its own variables to this test.
        kept = (name for name in os.environ if not name.startswith(("MAKE", "PYTHON", "EXTRAS", "PART")))
        environment = {name: os.environ[name] for name in kept}
        done = subprocess.run(["make", *words], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode != 0, "a target was missed"
        return (folder / "calls").read_text().splitlines()

    return make


def test_a_missed_target_keeps_no_record_from_being_made(root, made):
    written = re.findall(r"^\t\$\(BIN\)/(.* --record \w+)$", (root / "Makefile").read_text(), re.M)

    assert made("bench") == written
    assert len(written) > 5


def test_the_long_tests_run_after_a_missed_target(made):
    calls = made("proof")

    assert [call.split()[0] for call in calls[-3:]] == ["python", "pytest", "pytest"]


def test_bundle_is_built_for_the_target_with_the_python_that_is_here(made):
    assert made("offline", "EXTRAS=embedded,gpu13", "PYTHON=3.12", "PART=60M") == [
        "python -m tools.offline_bundle --extras embedded,gpu13 --part 60M --python 3.12"
    ]

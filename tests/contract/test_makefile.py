"""Targets of the Makefile that are more than a list of commands."""

import os
import shutil

from tests.commands import captured


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

"""A short soak, and each fault once, on a real server."""

import re
import subprocess
import sys

import pytest

from loadtest.torture.faults import FAULTS

pytestmark = pytest.mark.nightly(minutes=3)
# Seconds on busy cores cannot judge growth, nor whether each kind was due; `make soak` does.
UNCERTAIN = tuple(
    f"failed: {verdict}"
    for verdict in ("kinds sent too rarely", "memory", "open files,", "threads,", "processes,", "zombies,")
)


def test_torture_leaves_right_answers_and_nothing_else(capfd):
    words = ["--minutes", "0.1", "--rounds", str(len(FAULTS)), "--seed", "7"]

    subprocess.run([sys.executable, "-m", "loadtest.torture", *words], check=False)

    printed, errors = capfd.readouterr()
    failed = [line for line in errors.splitlines() if line.startswith("failed: ")]
    assert [line for line in failed if not line.startswith(UNCERTAIN)] == [], errors
    assert len(re.findall(r"^\| [^|]+ \| 1 \| ", printed, re.M)) == len(FAULTS), printed + errors

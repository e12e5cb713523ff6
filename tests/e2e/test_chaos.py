"""Each fault of the chaos test once, and what it finds."""

import random
import re
import subprocess
import sys

import pytest

from loadtest import chaos
from loadtest.chaos import Round, rounds_of, summarise
from loadtest.faults import FAULTS, IDLE

pytestmark = pytest.mark.slow


def test_every_fault_leaves_right_answers_and_nothing_else(capfd):
    """All callers succeed again after each fault, and the stopped server leaves no process and no memory."""
    command = [sys.executable, "-m", "loadtest.chaos", "--rounds", str(len(FAULTS)), "--seed", "7"]

    done = subprocess.run(command, check=False)

    printed, errors = capfd.readouterr()
    assert done.returncode == 0, errors
    assert len(re.findall(r"^\| [^|]+ \| 1 \| ", printed, re.M)) == len(FAULTS), printed


def test_wrong_answer_is_reported(tmp_path, monkeypatch):
    """Another expected score than the served one makes every answer wrong."""
    monkeypatch.setattr(chaos, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(chaos, "MAX_RECOVERY_S", 3.0)
    monkeypatch.setattr("loadtest.swap.TOLERANCE", -1.0)
    wrong: list[str] = []

    with pytest.raises(SystemExit, match="no recovery within 3 s"):
        rounds_of([IDLE], random.Random(1), tmp_path, wrong)

    assert wrong
    assert "expected one of [(967, " in wrong[0]


def test_rounds_are_summarised_by_fault():
    """Median and worst recovery, and all failed requests."""
    rounds = [Round("a", 1.0, 2), Round("b", 0.0, 0), Round("a", 3.0, 1), Round("a", 2.0, 0)]

    rows = summarise(rounds)

    assert [(row["fault"], row["rounds"], row["median"], row["max"], row["failed"]) for row in rows] == [
        ("a", 3, 2.0, 3.0, 3),
        ("b", 1, 0.0, 0.0, 0),
    ]

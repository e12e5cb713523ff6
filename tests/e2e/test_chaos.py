"""Each fault of the chaos test once, and what it finds."""

import random

import pytest

from loadtest import chaos
from loadtest.chaos import FAULTS, Round, rounds_of, summarise

pytestmark = pytest.mark.slow


def test_every_fault_leaves_right_answers_and_nothing_else(tmp_path):
    """All callers succeed again after each fault, and the stopped server leaves no process and no memory."""
    faults, wrong = [*FAULTS], list[str]()
    draw = random.Random(7)
    draw.shuffle(faults)

    found = rounds_of(faults, draw, tmp_path, wrong)

    assert [each.fault for each in found] == faults
    assert wrong == []
    assert all(each.back_s <= chaos.MAX_RECOVERY_S for each in found)


def test_wrong_answer_is_reported(tmp_path, monkeypatch):
    """Another expected score than the served one makes every answer wrong."""
    monkeypatch.setattr(chaos, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(chaos, "MAX_RECOVERY_S", 3.0)
    monkeypatch.setattr("loadtest.swap.TOLERANCE", -1.0)
    wrong: list[str] = []

    with pytest.raises(SystemExit, match="no recovery within 3 s"):
        rounds_of([chaos.IDLE], random.Random(1), tmp_path, wrong)

    assert wrong
    assert "expected espresso" in wrong[0]


def test_rounds_are_summarised_by_fault():
    """Median and worst recovery, and all failed requests."""
    rounds = [Round("a", 1.0, 2), Round("b", 0.0, 0), Round("a", 3.0, 1), Round("a", 2.0, 0)]

    rows = summarise(rounds)

    assert [(row["fault"], row["rounds"], row["median"], row["max"], row["failed"]) for row in rows] == [
        ("a", 3, 2.0, 3.0, 3),
        ("b", 1, 0.0, 0.0, 0),
    ]

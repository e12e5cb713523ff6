"""Which models are probed, from the counts of their requests, with a fake clock."""

from itertools import pairwise

import pytest

from nereid.server.supervision.activity import BUSY_S, IDLE_S, LOOK_S, Activity, Counts, read_counts


class Models:
    def __init__(self, *names: str) -> None:
        self.activity, self.now_s = Activity(), 1000.0
        self.counts = {name: Counts() for name in names}
        self.answered: set[str] = set()

    def answer(self, *names: str, failures: int = 0) -> None:
        for name in names:
            before = self.counts[name]
            self.counts[name] = Counts(before.succeeded + (not failures), before.failed + failures)

    def look(self, later_s: float = LOOK_S) -> set[str]:
        self.now_s += later_s
        self.answered = self.activity.look(self.counts, self.now_s)
        return self.activity.take_due(self.now_s)

    def probe(self, name: str, is_success: bool = True) -> None:
        """End a probe, which Triton counts as a request."""
        self.answer(name, failures=not is_success)
        self.activity.probed(name, is_success)


@pytest.fixture
def idle():
    """Three models that have answered one request each, as at the start of a server."""
    models = Models("a", "b", "c")
    models.answer("a", "b", "c")
    assert models.look() == set()
    return models


def test_models_that_never_answered_are_probed_together():
    models = Models("a", "b", "c")

    assert models.look() == {"a", "b", "c"}


def test_idle_models_are_probed_in_turn(idle):
    probes: dict[str, list[float]] = {name: [] for name in idle.counts}
    for _ in range(30):
        due = idle.look()
        assert len(due) <= 1
        for name in due:
            probes[name].append(idle.now_s)
            idle.probe(name)

    gaps = [b - a for times in probes.values() for a, b in pairwise(times)]
    assert all(IDLE_S <= gap <= 2 * IDLE_S for gap in gaps)


def test_model_that_answers_is_probed_seldom(idle):
    """Requests of others show that it works; a hanging instance among several is found by rare probes."""
    probed_s = []
    for _ in range(30):
        idle.answer("a")
        if "a" in idle.look():
            probed_s.append(idle.now_s)
            idle.probe("a")
        assert "a" in idle.answered

    assert {b - a for a, b in pairwise(probed_s)} == {BUSY_S}


def test_failed_probe_is_repeated_until_one_succeeds(idle):
    """Answers to others do not show that the instance which failed works again."""
    idle.answer("b")
    idle.answer("b", failures=1)
    assert (idle.look(), idle.answered) == ({"b"}, set())
    idle.probe("b", is_success=False)
    for _ in range(3):
        idle.answer("b")
        assert "b" in idle.look()
        assert "b" not in idle.answered

    idle.probe("b")
    assert "b" not in idle.look()
    assert "b" in idle.answered


def test_loaded_model_counts_from_zero(idle):
    idle.answer(*["a"] * 5)
    idle.look()
    idle.counts["a"] = Counts(1)
    idle.look()

    assert idle.answered == {"a"}


def test_end_of_a_probe_of_an_unloaded_model_is_ignored(idle):
    idle.probe("a", is_success=False)
    del idle.counts["a"]
    idle.look()
    idle.activity.probed("a", False)

    assert idle.look() <= {"b", "c"}


def test_counts_are_those_of_all_versions():
    def entry(name, version, succeeded, failed):
        outcomes = {"success": {"count": succeeded}, "fail": {"count": failed}}
        return {"name": name, "version": version, "inference_stats": outcomes}

    statistics = {"model_stats": [entry("a", "1", 3, 1), entry("a", "7", 4, 0), entry("b", "1", 0, 0)]}

    assert read_counts(statistics) == ({"a": {1, 7}, "b": {1}}, {"a": Counts(7, 1), "b": Counts()})

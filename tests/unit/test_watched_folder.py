"""When a file that somebody writes is complete, by a clock of the test's own."""

import pytest

from nereid.watched_folder import Arrivals


@pytest.fixture
def watched(tmp_path):
    """A folder, and a function that lets seconds pass and returns the files that are complete then."""
    now = 0.0
    (tmp_path / "old").write_bytes(b"1")
    arrivals = Arrivals(lambda: sorted(tmp_path.iterdir()), settle_s=1.0, clock=lambda: now)

    def after(seconds: float) -> list[str]:
        nonlocal now
        now += seconds
        return [path.name for path in arrivals.step()]

    return tmp_path, after


def test_file_is_told_of_once_it_has_settled(watched):
    """Not while it grows, not while it is empty, and once only; again when it has changed."""
    folder, after = watched
    (folder / "new").write_bytes(b"")
    assert after(5) == after(5) == []
    (folder / "new").write_bytes(b"12")
    assert after(0) == after(0.9) == []
    (folder / "new").write_bytes(b"123")
    assert after(0.9) == after(0.9) == []
    assert after(0.2) == ["new"]
    assert after(9) == []
    (folder / "new").write_bytes(b"1234")
    assert after(0) == []
    assert after(1) == ["new"]


def test_file_that_takes_the_place_of_another_is_new(watched):
    """Also one that was there before, and one that was gone in between."""
    folder, after = watched
    (folder / "part").write_bytes(b"1")
    (folder / "part").replace(folder / "old")
    assert after(0) == []
    assert after(1) == ["old"]
    (folder / "old").unlink()
    assert after(1) == []
    (folder / "old").write_bytes(b"2")
    assert after(0) == []
    assert after(1) == ["old"]

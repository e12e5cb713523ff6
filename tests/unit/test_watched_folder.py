"""Arrivals in a watched folder, with a fake clock."""

import pytest

from nereid.base.watched_folder import Arrivals


@pytest.fixture
def watched(tmp_path):
    now = 0.0
    (tmp_path / "old").write_bytes(b"1")
    arrivals = Arrivals(lambda: sorted(tmp_path.iterdir()), settle_s=1.0, clock=lambda: now)

    def after(seconds: float) -> list[str]:
        nonlocal now
        now += seconds
        return [path.name for path in arrivals.step()]

    return tmp_path, after


def test_file_is_reported_once_it_is_stable(watched):
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


def test_replaced_file_is_new(watched):
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

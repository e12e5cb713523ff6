"""What CI runs of the nightly tests: a quarter each time, and all of them together."""

from tests.conftest import NIGHTLY_PARTS, ROOT, deal


def test_parts_have_each_group_once_and_take_about_the_same_time():
    minutes = {"containers": 12.0, "soak": 3.0}
    minutes |= {"wheel": 2.0, **{f"file{number}": 1.0 for number in range(31)}}

    parts = deal(minutes)

    assert len(parts) == NIGHTLY_PARTS
    assert sorted(name for part in parts for name in part) == sorted(minutes)
    assert [sum(minutes[name] for name in part) for part in parts] == [12.0] * NIGHTLY_PARTS


def test_ci_can_choose_every_part():
    script = (ROOT / ".ci" / "run").read_text()

    part = f"$((0x$(git rev-parse HEAD | cut -c 1-7) % {NIGHTLY_PARTS} + 1))"
    assert f"make test-slow NIGHTLY_PART={part}" in script
    assert all(f"make {target}" in script for target in ("check", "test"))
    assert "make demo\n" in (ROOT / ".ci" / "bare").read_text()

"""Waits that grow while something keeps failing."""

import pytest

from nereid.back_off import BackOff


@pytest.mark.parametrize(
    ("ran_s", "expected"),
    [
        ([0, 0, 0, 0, 0], [0.2, 1, 4, 4, 4]),
        ([0, 59, 59, 59, 59], [0.2, 1, 4, 4, 4]),
        ([0, 0, 60, 0, 0], [0.2, 1, 0.2, 1, 4]),
        ([float("inf"), 0, 1000, 1000, 0], [0.2, 1, 0.2, 0.2, 1]),
    ],
    ids=["fails at once", "fails before it is calm", "was calm once", "first time"],
)
def test_waits_grow_until_all_was_well_for_a_while(ran_s, expected):
    """Each failure waits longer, up to the last delay; a calm while brings the first delay again."""
    back_off = BackOff([0.2, 1, 4], calm_s=60)

    assert [back_off.next_s(each) for each in ran_s] == expected

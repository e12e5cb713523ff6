"""Deadlines that one model gives another."""

import time

import pytest

from nereid.routing import deadline
from nereid.serving_errors import DeadlineExceeded, InvalidRequest


@pytest.mark.parametrize(
    "parameters", [{}, {"other": 1}, deadline.within(86_400)], ids=["none", "other", "left"]
)
def test_request_with_time_left_passes(parameters):
    """Without a deadline there is no hurry."""
    deadline.check(parameters)


def test_deadline_is_what_is_left():
    """The parameter is so many seconds from now, by the clock that all processes share."""
    before = time.monotonic_ns()
    (at,) = deadline.within(1.5).values()

    assert before + 1_500_000_000 <= at <= time.monotonic_ns() + 1_500_000_000


def test_request_whose_time_is_over_is_refused():
    """A call that had no time at all is late as soon as it is looked at."""
    late = deadline.within(-1e-9)

    with pytest.raises(DeadlineExceeded, match="expired while queued"):
        deadline.check(late)


@pytest.mark.parametrize("value", ["1", 1.5, True])
def test_other_deadline_is_refused(value):
    """Callers may send the parameter, too: what is no integer is named."""
    with pytest.raises(InvalidRequest, match=f"must be an integer, got {value!r}"):
        deadline.check({deadline.PARAMETER: value})

"""Deadlines of requests between models."""

import time

import pytest

from nereid.contract import DEADLINE_PARAMETER
from nereid.routing import deadline
from nereid.serving_errors import DeadlineExceeded, InvalidRequest


@pytest.mark.parametrize(
    "parameters", [{}, {"other": 1}, deadline.within(86_400)], ids=["none", "other", "left"]
)
def test_request_with_time_left_passes(parameters):
    """A request without a deadline, or before it, passes."""
    deadline.check(parameters)


def test_deadline_is_what_is_left():
    """The parameter is the timeout after now, by the clock that all processes share."""
    before = time.monotonic_ns()
    (at,) = deadline.within(1.5).values()

    assert before + 1_500_000_000 <= at <= time.monotonic_ns() + 1_500_000_000


def test_request_whose_time_is_over_is_refused():
    """A request without any time left is late."""
    late = deadline.within(-1e-9)

    with pytest.raises(DeadlineExceeded, match="expired while queued"):
        deadline.check(late)


@pytest.mark.parametrize("value", ["1", 1.5, True])
def test_other_deadline_is_refused(value):
    """Clients may send the parameter, too: a value other than an integer is refused."""
    with pytest.raises(InvalidRequest, match=f"must be an integer, got {value!r}"):
        deadline.check({DEADLINE_PARAMETER: value})

"""Deadlines of requests between models."""

import time

import pytest

from nereid.backends.routing import deadline
from nereid.base.contract import DEADLINE_PARAMETER
from nereid.base.serving_errors import DeadlineExceeded, InvalidRequest


def test_deadline_is_the_timeout_from_now():
    before = time.monotonic_ns()
    (at,) = deadline.within(1.5).values()

    assert before + 1_500_000_000 <= at <= time.monotonic_ns() + 1_500_000_000


def test_only_a_request_with_time_left_passes():
    for parameters in ({}, {"other": 1}, deadline.within(86_400)):
        deadline.check(parameters)
    with pytest.raises(DeadlineExceeded, match="expired while queued"):
        deadline.check(deadline.within(-1e-9))


@pytest.mark.parametrize("value", ["1", 1.5, True])
def test_invalid_deadline_is_rejected(value):
    with pytest.raises(InvalidRequest, match=f"must be an integer, got {value!r}"):
        deadline.check({DEADLINE_PARAMETER: value})

"""Deadlines for requests between models, as a request parameter.

A request's own `timeout` applies only in a queue whose `default_queue_policy` allows it. Such a policy costs
throughput (docs/architecture.md): Triton then forms no batch until an instance waits for it, and overlooks
some waiting instances. So the caller sends a parameter, which the receiving model compares with the clock.
Source: core r24.10, RateLimiter::PayloadSlotAvailable.
"""

import time
from collections.abc import Mapping
from typing import Any

from nereid.base.contract import DEADLINE_PARAMETER
from nereid.base.errors import DeadlineExceeded, InvalidRequest


def deadline_parameter(timeout_s: float) -> dict[str, int]:
    """Return the parameters of a request whose response is useless `timeout_s` seconds from now."""
    return {DEADLINE_PARAMETER: time.monotonic_ns() + int(timeout_s * 1e9)}


def check(parameters: Mapping[str, Any]) -> None:
    """Check the deadline of a request.

    Raises:
        DeadlineExceeded: the deadline has passed.
        InvalidRequest: the deadline is not an integer.
    """
    if (deadline_ns := parameters.get(DEADLINE_PARAMETER)) is None:
        return
    if type(deadline_ns) is not int:
        raise InvalidRequest(f"parameter '{DEADLINE_PARAMETER}' must be an integer, got {deadline_ns!r}")
    if deadline_ns < time.monotonic_ns():
        raise DeadlineExceeded("expired while queued for an instance")

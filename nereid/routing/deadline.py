"""Until when a call from one model to another is worth computing.

A request's own `timeout` counts only in a queue whose `default_queue_policy` allows it. With such a policy
Triton forms no batch before an instance waits for it, and overlooks some that wait, which costs throughput
(docs/benchmarks.md). So the caller says it in a parameter, and the model itself looks at the clock.
Source: core r24.10, RateLimiter::PayloadSlotAvailable, and what was measured.
"""

import time
from collections.abc import Mapping
from typing import Any

from nereid.serving_errors import DeadlineExceeded, InvalidRequest

# Of time.monotonic_ns, which all processes of a machine share.
PARAMETER = "deadline_monotonic_ns"


def within(timeout_s: float) -> dict[str, int]:
    """Return the parameters of a call that is of no use after so many seconds from now."""
    return {PARAMETER: time.monotonic_ns() + int(timeout_s * 1e9)}


def check(parameters: Mapping[str, Any]) -> None:
    """Let a request pass that has no deadline, or time left.

    Raises:
        DeadlineExceeded: its time is over.
        InvalidRequest: its deadline is not an integer.
    """
    if (deadline_ns := parameters.get(PARAMETER)) is None:
        return
    if type(deadline_ns) is not int:
        raise InvalidRequest(f"parameter '{PARAMETER}' must be an integer, got {deadline_ns!r}")
    if deadline_ns < time.monotonic_ns():
        raise DeadlineExceeded("it waited for an instance until its time was over")

"""Receivers of what happens in the runs of a session."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionEvents:
    """Functions that a session calls; by default nothing happens.

    Args:
        ran: after each run, with its seconds and its rows.
        halved: before a batch that did not fit into memory is run in two halves.
        warmed: after each run at load, with its seconds.
        device_failed: once, with the text of the error, when the device of the session has failed.
    """

    ran: Callable[[float, int], None] = lambda seconds, rows: None
    halved: Callable[[], None] = lambda: None
    warmed: Callable[[float], None] = lambda seconds: None
    device_failed: Callable[[str], None] = lambda reason: None

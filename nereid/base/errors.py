"""Errors of operations on models, routes and servers; `nereid.application.exit_codes` maps each class."""

import contextlib
from collections.abc import Iterator


class OperationFailed(Exception):
    """The requested operation failed; the message is `REASON`, or `REASON; fix: FIX`."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(f"{reason}; fix: {fix}" if fix else reason)
        self.reason, self.fix = reason, fix


class WrongUsage(OperationFailed):
    """The request itself is invalid: an unknown name, or options that exclude each other."""


class ServerError(OperationFailed):
    """The server cannot start, or ended by itself."""


@contextlib.contextmanager
def invalid_values() -> Iterator[None]:
    """Turn a `ValueError` about an option into wrong usage."""
    try:
        yield
    except ValueError as error:
        raise WrongUsage(str(error)) from None

"""Errors of operations on models, routes and servers; `nereid.cli` maps each class to an exit code."""


class OperationFailed(Exception):
    """The requested operation failed; the message is `REASON`, or `REASON; fix: FIX`."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(f"{reason}; fix: {fix}" if fix else reason)
        self.reason, self.fix = reason, fix


class WrongUsage(OperationFailed):
    """The request itself is invalid: an unknown name, or options that exclude each other."""


class ServerError(OperationFailed):
    """The server cannot start, or ended by itself."""

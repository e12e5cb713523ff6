"""Errors of operations on models, routes and servers; `nereid.cli` maps each class to an exit code."""


class OperationFailed(Exception):
    """The requested operation failed; the message has the reason and, if known, the fix."""


class WrongUsage(OperationFailed):
    """The request itself is invalid: an unknown name, or options that exclude each other."""


class ServerError(OperationFailed):
    """The server cannot start, or died; the message has the reason and the fix."""

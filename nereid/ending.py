"""SIGTERM as an end like any other: what is open is closed, so that no process and no file is left."""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

# As a shell tells that a signal ended a command.
SIGNALLED = 128


@contextlib.contextmanager
def tidy() -> Iterator[None]:
    """Turn the first SIGTERM into `SystemExit`, wherever the main thread is; further ones are ignored."""

    def end(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(SIGNALLED + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

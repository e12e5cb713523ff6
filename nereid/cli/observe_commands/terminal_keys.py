"""Keys of a terminal, each as soon as it is pressed."""

import contextlib
import os
import select
import termios
import time
import tty
from collections.abc import Callable, Iterator
from typing import IO


@contextlib.contextmanager
def open_keys(stream: IO[str]) -> Iterator[Callable[[float], str]]:
    """Give a function that waits some seconds for a key, and returns it; empty without one.

    Keys are neither shown nor collected until Enter; Ctrl-C still is a signal. Without a terminal there are
    no keys, and after its end the function returns `q`.
    """
    if not stream.isatty():
        yield _sleep
        return
    number = stream.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield lambda seconds: _key(number, seconds)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def _key(number: int, seconds: float) -> str:
    if not select.select([number], [], [], seconds)[0]:
        return ""
    return os.read(number, 1).decode(errors="replace") or "q"


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""

"""Folders that others write to: when to look at one, until when, and which of its files are complete."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

# Files are looked at this often whether or not anything is heard of them: NFS tells nobody.
LOOK_S = 2.5


class Stop:
    """Whether a signal has asked to stop; no `threading.Event`, which a handler could find locked."""

    def __init__(self) -> None:
        self._is_set = False
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self._set)

    def is_set(self) -> bool:
        """Tell whether a signal has come; the second one ends the process."""
        return self._is_set

    def _set(self, number: int, frame: FrameType | None) -> None:
        self._is_set = True
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)


def looks_at(
    folder: Path, every_s: float, is_polling: bool, stop: Stop, tell: Callable[[str], None]
) -> Iterator[object]:
    """Yield when something was heard of, and after `every_s` at the latest, until `stop`."""
    from watchfiles import watch as events

    try:
        yield from events(
            folder,
            watch_filter=None,
            stop_event=stop,
            rust_timeout=max(1, int(every_s * 1000)),
            yield_on_timeout=True,
            force_polling=is_polling or None,
        )
    except (OSError, RuntimeError) as error:  # such as too many folders that are watched on this machine
        tell(f"the filesystem does not tell of changes, so it is asked every {every_s:g} s: {error}")
    while not stop.is_set():
        yield None
        time.sleep(every_s)


class Arrivals:
    """Tells of each file once it has stayed as it is for a while, and again when it has changed.

    What is there at the beginning is none.

    Args:
        find: returns the files that are meant.
        settle_s: for how long a file must look the same.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        find: Callable[[], list[Path]],
        settle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find, self._settle_s, self._clock = find, settle_s, clock
        self._told = {path: look for path in find() if (look := _look(path))}
        self._seen: dict[Path, tuple[tuple[int, ...], float]] = {}

    def step(self) -> list[Path]:
        """Look at all files; returns those that are complete now."""
        now = self._clock()
        looks = {path: look for path in self._find() if (look := _look(path))}
        self._told = {path: look for path, look in self._told.items() if looks.get(path) == look}
        new = {path: look for path, look in looks.items() if path not in self._told}
        self._seen = {
            path: self._seen[path] if self._seen.get(path, (None, 0))[0] == look else (look, now)
            for path, look in new.items()
        }
        complete = [path for path, (_, since) in self._seen.items() if now - since >= self._settle_s]
        self._told.update((path, self._seen.pop(path)[0]) for path in complete)
        return complete


def _look(path: Path) -> tuple[int, ...]:
    """Return how a file looks from outside; nothing if it is gone, or has just been begun."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return (status.st_ino, status.st_size, status.st_mtime_ns) if status.st_size else ()

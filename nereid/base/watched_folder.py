"""Folders that other programs write to: change notifications and completed files."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nereid.base.processes import StopFlag

# Folders are also listed at this interval, because NFS sends no notifications.
POLL_INTERVAL_S = 2.5

# A file's inode, size and change time.
Status = tuple[int, int, int]


def changes(
    folder: Path, every_s: float, is_polling: bool, stop: StopFlag, warn: Callable[[str], None]
) -> Iterator[object]:
    """Yield after each change notification, and at least every `every_s` seconds, until `stop` is set."""
    from watchfiles import watch as notices

    try:
        yield from notices(
            folder,
            watch_filter=None,
            stop_event=stop,
            rust_timeout=max(1, int(every_s * 1000)),
            yield_on_timeout=True,
            force_polling=is_polling or None,
        )
    except (OSError, RuntimeError) as error:  # for example too many watched folders on this machine
        warn(
            f"no notice of changes from the filesystem, so the folder is listed every {every_s:g} s: {error}"
        )
    while not stop.is_set():
        yield None
        time.sleep(every_s)


class Arrivals:
    """Finds new and changed files among those returned by `find`, once they are complete.

    A file is complete after `settle_s` seconds without a change. Files that exist at the start are not new.
    """

    def __init__(
        self,
        find: Callable[[], list[Path]],
        settle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find, self._settle_s, self._clock = find, settle_s, clock
        self._reported = self._statuses()
        self._pending: dict[Path, tuple[Status, float]] = {}

    def step(self) -> list[Path]:
        """Return the files that have become complete since the last call."""
        now = self._clock()
        statuses = self._statuses()
        self._reported = {path: old for path, old in self._reported.items() if statuses.get(path) == old}
        new = {path: status for path, status in statuses.items() if path not in self._reported}
        self._pending = {
            path: before if (before := self._pending.get(path)) and before[0] == status else (status, now)
            for path, status in new.items()
        }
        complete = [path for path, (_, since) in self._pending.items() if now - since >= self._settle_s]
        self._reported.update((path, self._pending.pop(path)[0]) for path in complete)
        return complete

    def _statuses(self) -> dict[Path, Status]:
        return {path: status for path in self._find() if (status := _status(path))}


def _status(path: Path) -> Status | None:
    """Return a file's status, or None if the file is gone or still empty."""
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime_ns) if status.st_size else None

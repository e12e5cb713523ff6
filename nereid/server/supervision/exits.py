"""Waiting for the end of processes that are not children of this one, without looking again and again."""

import contextlib
import os
import select
from collections.abc import Collection

# Linux before 5.3 and some sandboxes cannot wait for the process of another parent.
FALLBACK_S = 0.1
MS_PER_S = 1000


class Exits:
    """The processes whose end one thread waits for; others may call `interrupt`."""

    def __init__(self) -> None:
        self._files: dict[int, int] = {}
        self._interrupted = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._interrupted, select.POLLIN)

    def wait(self, pids: Collection[int], timeout_s: float) -> None:
        """Return when one of the processes has ended, after `interrupt`, or after `timeout_s`.

        A zombie has ended, so it must not be among `pids`.
        """
        for pid in self._files.keys() - pids:
            self._forget(pid)
        for pid in set(pids) - self._files.keys():
            try:
                self._files[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            except OSError:
                timeout_s = min(timeout_s, FALLBACK_S)
            else:
                self._poll.register(self._files[pid], select.POLLIN)
        self._poll.poll(timeout_s * MS_PER_S)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._interrupted)

    def interrupt(self) -> None:
        """End the present call of `wait`, or the next one."""
        os.eventfd_write(self._interrupted, 1)

    def close(self) -> None:
        """Wait for no process any more."""
        for pid in [*self._files]:
            self._forget(pid)
        os.close(self._interrupted)

    def _forget(self, pid: int) -> None:
        file = self._files.pop(pid)
        self._poll.unregister(file)
        os.close(file)

"""What a server takes from its machine: CPU time, memory and open files of its whole process tree."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Usage:
    """A process tree at one moment.

    `memory_bytes` is PSS: pages that processes share count once in all. `zombies` have ended, and nobody has
    asked how.
    """

    processes: int
    zombies: int
    threads: int
    open_files: int
    memory_bytes: int


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all that it started, as far as they still run."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, that the processes of the tree have taken so far."""
    times = _each(pid, "cpu_times")
    return float(sum(each.user + each.system for each in times))


def memory_bytes(pid: int) -> int:
    """Return the memory (PSS) of the tree."""
    return int(sum(memory.pss for memory in _each(pid, "memory_full_info")))


def usage(pid: int) -> Usage:
    """Look at the whole tree."""
    statuses = list(_each(pid, "status"))
    return Usage(
        processes=len(statuses),
        zombies=statuses.count(psutil.STATUS_ZOMBIE),
        threads=sum(_each(pid, "num_threads")),
        open_files=sum(_each(pid, "num_fds")),
        memory_bytes=memory_bytes(pid),
    )


def shared_memory() -> dict[str, int]:
    """Return the names of this machine's shared memory regions, and their bytes."""
    with os.scandir(SHARED_MEMORY) as entries:
        return {entry.name: entry.stat().st_size for entry in entries}


def _each(pid: int, question: str) -> Iterator:
    for process in tree(pid):
        # One that ended meanwhile, or has ended and is no more than a status, takes nothing.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            yield getattr(process, question)()

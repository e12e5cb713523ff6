"""What a server takes from its machine: CPU time, memory and open files of its whole process tree."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm"
MB = 1e6


@dataclass(frozen=True, slots=True)
class Usage:
    """A process tree at one moment.

    `memory_bytes` is `own_bytes`. `zombies` have ended, and nobody has asked how.
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


def own_bytes(pid: int) -> int:
    """Return the memory (PSS) of one process but for the pages of files.

    Those are not its own doing: its share of a library is less while any other process maps it, too.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def usage(pid: int) -> Usage:
    """Look at the whole tree."""
    statuses = list(_each(pid, "status"))
    return Usage(
        processes=len(statuses),
        zombies=statuses.count(psutil.STATUS_ZOMBIE),
        threads=sum(_each(pid, "num_threads")),
        open_files=sum(_each(pid, "num_fds")),
        memory_bytes=sum(_own_bytes_of_each(pid)),
    )


def _own_bytes_of_each(pid: int) -> Iterator[int]:
    for process in tree(pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or has and is no more than a status
            yield own_bytes(process.pid)


def shared_memory() -> dict[str, int]:
    """Return the names of this machine's shared memory regions, and their bytes."""
    found = {}
    with os.scandir(SHARED_MEMORY) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # it went meanwhile
                found[entry.name] = entry.stat().st_size
    return found


def _each(pid: int, question: str) -> Iterator:
    for process in tree(pid):
        # One that ended meanwhile, or has ended and is no more than a status, takes nothing.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            yield getattr(process, question)()

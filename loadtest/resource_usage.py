"""CPU time and memory of a process tree."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

MB = 1e6


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants that still run."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, of the tree so far."""
    return float(sum(times.user + times.system for times in _each(pid, "cpu_times")))


def memory_bytes(pid: int) -> int:
    """Return the memory (PSS) of the tree."""
    return int(sum(memory.pss for memory in _each(pid, "memory_full_info")))


def own_bytes(pid: int) -> int:
    """Return the memory (PSS) of one process without the pages of files.

    The share of a library's pages changes when any other process maps the library.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _each(pid: int, method: str) -> Iterator:
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it ended, or is a zombie
            yield getattr(process, method)()

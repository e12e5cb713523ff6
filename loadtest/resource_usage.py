"""CPU time and memory of a process tree."""

from pathlib import Path

import psutil

from nereid.server.supervision import process_usage

MB = 1e6


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants that still run."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds, user and system, of the tree so far."""
    return sum(process.cpu_s for process in process_usage.tree({pid}))


def memory_bytes(pid: int) -> int:
    """Return the memory (PSS) of the tree."""
    return sum(process.memory_bytes for process in process_usage.read_tree(pid, ""))


def own_bytes(pid: int) -> int:
    """Return the memory (PSS) of one process without the pages of files.

    The share of a library's pages changes when any other process maps the library.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))

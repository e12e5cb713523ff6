"""Processes of this machine: cores, signals, and how children end."""

import os
import platform
from pathlib import Path


def available_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may use: its affinity, and its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text().split()
        return cores if quota == "max" else max(1, min(cores, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return cores


def cpu_model() -> str:
    """Return the processor's name as the kernel reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()

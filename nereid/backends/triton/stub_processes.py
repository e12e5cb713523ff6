"""The stub processes of a server: one for each instance of a Python-based backend."""

import contextlib
import os
import socket
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

ZOMBIE, STOPPED = "Z", "T"
PROC = Path("/proc")
DESCRIPTORS = PROC / "self/fd"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Positions in the stub's command line: the path of its model.py, and the name of its instance.
MODEL_PATH, INSTANCE = 1, 8


@dataclass(frozen=True, slots=True)
class Process:
    """Identity of a process: its pid, and its start time in clock ticks since boot."""

    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One process in the kernel's table: its state as a letter, CPU seconds, and number of page faults."""

    process: Process
    name: str
    state: str
    parent: int
    cpu_s: float
    faults: int


@dataclass(frozen=True, slots=True)
class Stub:
    """The process of one instance of one version of a model."""

    process: Process
    model: str
    version: int
    instance: str

    @property
    def instance_key(self) -> tuple[str, int, str]:
        """Model, version and instance, which only one stub in use has at a time."""
        return self.model, self.version, self.instance


def find(leader: int, repository: Path, proc: Path = PROC) -> list[Stub]:
    """Return the stubs of models of `repository` below `tritonserver`, without zombies."""
    stubs = []
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        process_stat = read_stat(folder)
        if process_stat and process_stat.parent == leader:
            stubs += list(_stub(process_stat.process, repository, folder))
    return stubs


def read_stat(folder: Path) -> ProcessStat | None:
    """Return what the kernel shows of a process in its folder below `/proc`; None if the process has ended.

    Source: proc(5), the fields of stat. The name, in brackets, may hold anything.
    """
    try:
        text = (folder / "stat").read_text(errors="replace")
    except OSError:
        return None
    before, _, after = text.rpartition(")")
    fields = after.split()
    return ProcessStat(
        process=Process(int(folder.name), int(fields[19])),
        name=before.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        cpu_s=(int(fields[11]) + int(fields[12])) / TICKS_PER_S,
        faults=int(fields[7]) + int(fields[9]),
    )


def states(processes: Collection[Process], proc: Path = PROC) -> dict[Process, str]:
    """Return the kernel's letter for the state of each process that still exists."""
    letters = {}
    for process in processes:
        process_stat = read_stat(proc / str(process.pid))
        if process_stat and process_stat.process == process:
            letters[process] = process_stat.state
    return letters


def model_of(instance: str) -> str:
    """Return the model of an instance; Triton names instances MODEL_GROUP_NUMBER."""
    return instance.rsplit("_", 2)[0]


def has_process(repository: Path, instance: str, age_s: float, proc: Path = PROC) -> bool:
    """Return whether the model of a dead instance has a running process: another one, or the replacement.

    Call this from a stub of the same server.

    Args:
        instance: the dead instance, as Triton names it: `MODEL_GROUP_INDEX`.
        age_s: the minimum age of the process in seconds. A replacement may not be ready yet.
        proc: where the kernel shows processes.
    """
    model = model_of(instance)
    latest = (time.clock_gettime(time.CLOCK_BOOTTIME) - age_s) * TICKS_PER_S
    stubs = [stub for stub in find(os.getppid(), repository, proc) if stub.model == model]
    processes = [stub.process for stub in stubs if stub.process.start_ticks <= latest]
    return any(letter not in (ZOMBIE, STOPPED) for letter in states(processes, proc).values())


def uptime_s(pid: int) -> float | None:
    """Return how many seconds ago a process started; None if there is none."""
    process_stat = read_stat(PROC / str(pid))
    if process_stat is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process_stat.process.start_ticks / TICKS_PER_S


def close_connections() -> None:
    """Close the inherited connections of clients.

    In Triton 24.10, a stub inherits the HTTP connections that are open when it starts. A connection that the
    server closes then stays open as long as the stub lives: its client waits in vain for the end, and the
    kernel keeps its buffers. Call this function before the process opens its own connections.
    """
    for number in [int(descriptor.name) for descriptor in DESCRIPTORS.iterdir()]:
        with contextlib.suppress(OSError):  # the descriptor with which the folder was read
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                inherited = socket.socket(fileno=number)
                if inherited.family in (socket.AF_INET, socket.AF_INET6):
                    inherited.close()
                else:
                    inherited.detach()


def _stub(process: Process, repository: Path, folder: Path) -> Iterator[Stub]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        argv = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        model, version, *_ = Path(argv[MODEL_PATH]).relative_to(repository).parts
        yield Stub(process, model, int(version), argv[INSTANCE])

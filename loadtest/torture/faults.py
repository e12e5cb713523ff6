"""The faults, each of which one function lets happen to a server and a gateway under load."""

import contextlib
import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest import servers
from loadtest.torture.changes import ROUTE, Changes
from loadtest.torture.requests import GOOD, INFER, RAW, connect, head
from loadtest.torture.traffic import Target
from nereid.backends.triton import stub_memory, stub_processes
from nereid.base import files
from nereid.base.contract import VARIANT_HEADER
from nereid.base.errors import OperationFailed
from nereid.base.processes import available_cores, end_with_parent

SHORT_S, END_S = 2.0, 40.0
IDLE_CONNECTIONS, LEAVING_CALLERS = 300, 100
# The sizes of the file systems that are filled; a larger one belongs to others.
DISK_BYTES, SHARED_MEMORY_BYTES, MAX_FILLED = 2**30, 2**30, 2**30
# Source: the kernel's include/uapi/linux/sched.h.
CLONE_NEWNS = 0x20000


class Gateway:
    """A gateway that can be replaced; its address is that of the target."""

    def __init__(self, target: Target, stack: contextlib.ExitStack) -> None:
        self.pid, self.port = 0, 0
        self._target, self._stack = target, stack.enter_context(contextlib.ExitStack())
        self.start()

    def start(self) -> None:
        """Start a gateway in place of the present one."""
        self._stack.close()
        http_port = int(self._target.http.rpartition(":")[2])
        self.pid, self.port = self._stack.enter_context(servers.gateway(http_port))
        self._target.gateway = f"127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Scene:
    """A running server and gateway, and what draws their faults."""

    running: servers.Supervised
    gateway: Gateway
    changes: Changes
    draw: random.Random

    def stub(self) -> int:
        """Draw one process of a model."""
        stubs = stub_processes.find(self.running.server_info.pid, self.running.repository)
        return self.draw.choice(sorted(stub.process.pid for stub in stubs))


def _pause(scene: Scene, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    time.sleep(scene.draw.uniform(0.1, SHORT_S))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _end_server(scene: Scene) -> None:
    server = psutil.Process(scene.running.server_info.pid)
    server.terminate()
    psutil.wait_procs([server], timeout=END_S)


def _replace_gateway(scene: Scene) -> None:
    os.kill(scene.gateway.pid, signal.SIGKILL)
    scene.gateway.start()


def _hold(condition: contextlib.AbstractContextManager[None]) -> None:
    with condition:
        time.sleep(SHORT_S)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run a number of busy processes."""
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command, preexec_fn=end_with_parent()) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


def _open_idle_connections(scene: Scene) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(IDLE_CONNECTIONS):
            with contextlib.suppress(TimeoutError):
                held.enter_context(connect(scene.running.server_info.url("http"), SHORT_S))
        time.sleep(SHORT_S)


def _leave_early(scene: Scene) -> None:
    """Send many requests, of which some are incomplete, and leave before the responses."""
    request = head(INFER, len(GOOD), {**RAW, VARIANT_HEADER: "v1"}) + GOOD
    with contextlib.ExitStack() as held:
        for _ in range(LEAVING_CALLERS):
            connection = held.enter_context(connect(scene.running.server_info.url("http")))
            connection.sendall(request[: scene.draw.randint(1, 2 * len(request))])
        time.sleep(0.05)


def _lack_files(scene: Scene) -> None:
    """Let `tritonserver` open only two more files, while many connections arrive."""
    pid = scene.running.server_info.pid
    _, most = before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = len([*Path(f"/proc/{pid}/fd").iterdir()])
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 2, most))
    try:
        _open_idle_connections(scene)
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def _damage_route(scene: Scene) -> None:
    path = scene.running.repository / f"{ROUTE}.route.json"
    text = path.read_bytes()
    files.replace(path, text[: scene.draw.randrange(len(text) // 2)])
    time.sleep(SHORT_S)
    files.replace(path, text)


def _damage_journal(scene: Scene) -> None:
    """Change a bit of the journal before its last line, between two rounds of publications."""
    scene.changes.cycle()
    path = files.state_folder(scene.running.repository) / "journal.jsonl"
    content = bytearray(path.read_bytes())
    end = content.rstrip().rfind(b"\n")
    content[scene.draw.randrange(end)] ^= 1 << scene.draw.randrange(8)
    path.write_bytes(content)
    scene.changes.cycle()


def _fill_disk(scene: Scene) -> None:
    """Fill the disk of the repository: a publication fails, and works when there is space again."""
    with filled(scene.running.repository):
        try:
            scene.changes.cycle()
        except (OSError, OperationFailed) as error:
            if "No space left" not in str(error):
                raise
        else:
            raise RuntimeError(
                "expected that a publication needs space on the disk, got a success without any"
            )
        time.sleep(SHORT_S)
    scene.changes.cycle()


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leave no free byte on the file system of a folder.

    Raises:
        RuntimeError: the file system is so large that others may need it.
    """
    if (size := shutil.disk_usage(folder).total) > MAX_FILLED:
        raise RuntimeError(f"expected a file system of at most {MAX_FILLED} bytes for {folder}, got {size}")
    path = folder / "fill"
    try:
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def own_file_systems() -> Iterator[Path]:
    """Mount a small disk, which it gives, and a small `/dev/shm`, for this process and its children only.

    Raises:
        SystemExit: the system does not allow it.
    """
    with tempfile.TemporaryDirectory() as folder:
        if ctypes.CDLL(None).unshare(CLONE_NEWNS):
            raise SystemExit("expected the right to mount file systems, got none\nfix: run it as root")
        _mount("--make-rprivate", "/")
        for path, size in ((folder, DISK_BYTES), (str(stub_memory.FOLDER), SHARED_MEMORY_BYTES)):
            _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", path)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


IDLE = f"{IDLE_CONNECTIONS} idle connections"
FAULTS: dict[str, Callable[[Scene], None]] = {
    "a stub is killed": lambda scene: os.kill(scene.stub(), signal.SIGKILL),
    "a stub is stopped": lambda scene: os.kill(scene.stub(), signal.SIGSTOP),
    "`tritonserver` is killed": lambda scene: os.kill(scene.running.server_info.pid, signal.SIGKILL),
    "`tritonserver` gets SIGTERM": _end_server,
    "`tritonserver` is stopped for up to 2 s": lambda scene: _pause(scene, scene.running.server_info.pid),
    "the gateway is killed, and another one starts": _replace_gateway,
    "the gateway is stopped for up to 2 s": lambda scene: _pause(scene, scene.gateway.pid),
    "other programs take the cores for 2 s": lambda scene: _hold(busy(2 * available_cores())),
    IDLE: _open_idle_connections,
    f"{LEAVING_CALLERS} callers leave early": _leave_early,
    f"{IDLE}, and two files to open": _lack_files,
    "a publication and a rollback": lambda scene: scene.changes.cycle(),
    "the route file is damaged for 2 s": _damage_route,
    "a bit of the journal is damaged": _damage_journal,
    "the disk is full for 2 s": _fill_disk,
    "the shared memory is full for 2 s": lambda scene: _hold(filled(stub_memory.FOLDER)),
}

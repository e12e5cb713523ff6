"""The faults of the chaos test, each of which one function lets happen to a server under load."""

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest import servers
from loadtest.recovery import PUBLIC_NAME
from loadtest.soak.changes import Changes
from nereid import assets, files
from nereid.contract import VARIANT_HEADER
from nereid.errors import OperationFailed
from nereid.processes import available_cores, end_with_parent
from nereid.server.embedded_server import infer_path
from nereid.triton import stub_memory, stub_processes

SHORT_S, TIMEOUT_S, END_S = 2.0, 10.0, 40.0
IDLE_CONNECTIONS, LEAVING_CALLERS = 300, 100
# The largest file system that is filled: one that others use is larger.
MAX_FILLED = 2**30


@dataclass(frozen=True, slots=True)
class Scene:
    """A running server, and what draws its faults."""

    running: servers.Supervised
    changes: Changes
    draw: random.Random

    @property
    def stubs(self) -> list[stub_processes.Stub]:
        """The present stubs, in a fixed order."""
        found = stub_processes.find(self.running.record.pid, self.running.repository)
        return sorted(found, key=lambda stub: (stub.model, stub.instance, stub.process.pid))

    def processes(self) -> set[psutil.Process]:
        """Return the present processes of the server."""
        found = set()
        for pid in (self.running.record.pid, *(stub.process.pid for stub in self.stubs)):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(psutil.Process(pid))
        return found

    def servers(self) -> set[str]:
        """Return the names that begin those of the server's files in /dev/shm."""
        maps = Path(f"/proc/{self.running.record.pid}/maps").read_text()
        return set(re.findall(rf"{stub_memory.FOLDER}/({stub_memory.PREFIX}[0-9a-f]+)-", maps))

    def address(self) -> tuple[str, int]:
        """Return the address of Triton's HTTP port."""
        return "127.0.0.1", self.running.record.ports.http


def kill_stub(scene: Scene) -> None:
    """Kill one process of a model."""
    os.kill(scene.draw.choice(scene.stubs).process.pid, signal.SIGKILL)


def stop_stub(scene: Scene) -> None:
    """Stop one process of a model, which then hangs."""
    os.kill(scene.draw.choice(scene.stubs).process.pid, signal.SIGSTOP)


def kill_server(scene: Scene) -> None:
    """Kill `tritonserver`."""
    os.kill(scene.running.record.pid, signal.SIGKILL)


def end_server(scene: Scene) -> None:
    """Ask `tritonserver` to end, and wait for its end."""
    pid = scene.running.record.pid
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)


def pause_server(scene: Scene) -> None:
    """Stop `tritonserver` for some time."""
    pid = scene.running.record.pid
    os.kill(pid, signal.SIGSTOP)
    time.sleep(scene.draw.uniform(0.1, SHORT_S))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def take_cores(scene: Scene) -> None:
    """Run more busy processes than there are cores."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command, preexec_fn=end_with_parent()) for _ in range(2 * available_cores())]
    time.sleep(SHORT_S)
    for each in busy:
        each.kill()
        each.wait()


def open_idle_connections(scene: Scene) -> None:
    """Open many connections that send nothing."""
    with contextlib.ExitStack() as held:
        for _ in range(IDLE_CONNECTIONS):
            with contextlib.suppress(TimeoutError):
                held.enter_context(socket.create_connection(scene.address(), SHORT_S))
        time.sleep(SHORT_S)


def leave_early(scene: Scene) -> None:
    """Send many requests, of which some are incomplete, and leave before the responses."""
    body = assets.COFFEE.read_bytes()
    head = f"POST {infer_path(PUBLIC_NAME)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    request = f"{head}{VARIANT_HEADER}: v1\r\nInference-Header-Content-Length: 0\r\n\r\n".encode() + body
    with contextlib.ExitStack() as held:
        for _ in range(LEAVING_CALLERS):
            connection = held.enter_context(socket.create_connection(scene.address(), TIMEOUT_S))
            connection.sendall(request[: scene.draw.randint(1, 2 * len(request))])
        time.sleep(0.05)


def publish(scene: Scene) -> None:
    """Publish a version, roll it back and retire it, change weights, and reload a model."""
    scene.changes.cycle()


def lack_files(scene: Scene) -> None:
    """Let `tritonserver` open only two more files, while many connections arrive."""
    pid = scene.running.record.pid
    _, most = before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = len([*Path(f"/proc/{pid}/fd").iterdir()])
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 2, most))
    try:
        open_idle_connections(scene)
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def damage_route(scene: Scene) -> None:
    """Cut off the route file for some time."""
    path = scene.running.repository / f"{PUBLIC_NAME}.route.json"
    text = path.read_bytes()
    files.replace(path, text[: scene.draw.randrange(len(text) // 2)])
    time.sleep(SHORT_S)
    files.replace(path, text)


def damage_journal(scene: Scene) -> None:
    """Change a bit of the journal before its last line, between two rounds of publications."""
    scene.changes.cycle()
    path = files.state_folder(scene.running.repository) / "journal.jsonl"
    content = bytearray(path.read_bytes())
    end = content.rstrip().rfind(b"\n")
    content[scene.draw.randrange(end)] ^= 1 << scene.draw.randrange(8)
    path.write_bytes(content)
    scene.changes.cycle()


def fill_disk(scene: Scene) -> None:
    """Fill the disk of the model repository: a publication fails, and works when there is space again."""
    with filled(scene.running.repository):
        try:
            scene.changes.cycle()
        except (OSError, OperationFailed) as error:
            if "No space left" not in str(error):
                raise
        else:
            raise SystemExit("expected that a publication needs space on the disk, got a success without any")
        time.sleep(SHORT_S)
    scene.changes.cycle()


def fill_memory(scene: Scene) -> None:
    """Fill the shared memory for some time."""
    with filled(stub_memory.FOLDER):
        time.sleep(SHORT_S)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leave no free byte on the file system of a folder.

    Raises:
        SystemExit: the file system is so large that others may need it.
    """
    if (size := shutil.disk_usage(folder).total) > MAX_FILLED:
        raise SystemExit(f"expected a file system of at most {MAX_FILLED} bytes for {folder}, got {size}")
    path = folder / "fill"
    try:
        with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        yield
    finally:
        path.unlink()


IDLE = f"{IDLE_CONNECTIONS} idle connections"
FAULTS: dict[str, Callable[[Scene], None]] = {
    "a stub is killed": kill_stub,
    "a stub is stopped": stop_stub,
    "`tritonserver` is killed": kill_server,
    "`tritonserver` gets SIGTERM": end_server,
    "`tritonserver` is stopped for up to 2 s": pause_server,
    "other programs take the cores for 2 s": take_cores,
    IDLE: open_idle_connections,
    f"{LEAVING_CALLERS} callers leave early": leave_early,
    f"{IDLE}, and two files to open": lack_files,
    "a publication and a rollback": publish,
    "the route file is damaged for 2 s": damage_route,
    "a bit of the journal is damaged": damage_journal,
    "the disk is full for 2 s": fill_disk,
    "the shared memory is full for 2 s": fill_memory,
}

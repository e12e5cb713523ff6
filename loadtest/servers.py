"""Real servers on free ports, for the duration of a context."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any

from nereid.base import assets
from nereid.base.errors import ServerError
from nereid.base.processes import end_with_parent
from nereid.server import run_dir
from nereid.server.command_line import DEFAULT_PROFILE, KEEP_BUFFERS, ServerOptions
from nereid.server.embedded_server import STOP_TIMEOUT_S, EmbeddedServer
from nereid.server.ports import Ports, free_ports

# A child's fork handlers of gRPC may end it before it becomes a server; it never uses gRPC before.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

ANY_PORTS = [word for name in ("http", "grpc", "metrics", "health") for word in (f"--{name}-port", "0")]
# The time after which `nereid serve` has killed a server that does not stop, and some more.
END_S = STOP_TIMEOUT_S + 20.0
# The time after which a service by hand has failed to start.
START_S = 60.0
# Characters of the log that an error message shows.
LOG_CHARACTERS = 20000


@dataclass(frozen=True, slots=True)
class Supervised:
    """A running `nereid serve`: its process, and the environment to find its server."""

    pid: int
    environment: Mapping[str, str]
    repository: Path

    @property
    def server_info(self) -> run_dir.ServerInfo:
        """The present server; a restart replaces it."""
        server_info = run_dir.find(run_dir.root(self.environment), self.repository)
        assert server_info is not None, "nereid serve ended"
        return server_info

    def is_ready(self) -> bool:
        """Check whether the supervisor reports that the server is ready."""
        url = f"http://{self.server_info.health_url}/readyz"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=END_S) as response:
            return bool(response.status == HTTPStatus.OK)
        return False


@contextlib.contextmanager
def served(
    folder: Path,
    environment: Mapping[str, str],
    profile: str = DEFAULT_PROFILE,
    repository: Path = assets.REPOSITORY,
    flags: Sequence[str] = (),
) -> Iterator[EmbeddedServer]:
    """Start a server and wait until it is ready; several servers may share a folder for their files."""
    ports = Ports(*free_ports(3))
    options = ServerOptions(repository, profile, ports=ports, flags=tuple(flags))
    server_folder = folder / f"server-{ports.http}"
    server_folder.mkdir()
    with EmbeddedServer(options, server_folder, environment) as server:
        yield server


@contextlib.contextmanager
def supervised(
    repository: Path, folder: Path, environment: Mapping[str, str], words: Sequence[str] = ()
) -> Iterator[Supervised]:
    """Run `nereid serve` on free ports, with a health port, and wait until it is ready.

    The folder takes its log and its run directory.

    Raises:
        SystemExit: the command does not start; the message has the end of its log.
    """
    environment = {**environment, "XDG_RUNTIME_DIR": str(folder)}
    command = ["serve", "--repository", str(repository), *ANY_PORTS, *words]
    with (folder / "log").open("w") as log, started(command, environment, log) as (pid, _):
        try:
            yield Supervised(pid, environment, repository)
        except BaseException:
            print(f"the server's log ends:\n{log_tail(folder / 'log')}", file=sys.stderr)
            raise


@contextlib.contextmanager
def gateway(http_port: int) -> Iterator[tuple[int, int]]:
    """Run `nereid gateway` in front of a server, and wait until it listens; gives its pid and port.

    Raises:
        SystemExit: the gateway does not start.
    """
    words = ["gateway", "--url", f"127.0.0.1:{http_port}", "--port", "0", "--workers", "1"]
    with started(words) as (pid, document):
        yield pid, document["http"]


@contextlib.contextmanager
def started(
    words: Sequence[str], environment: Mapping[str, str] | None = None, log: IO[str] | None = None
) -> Iterator[tuple[int, Any]]:
    """Run a command of `nereid` that prints one line of JSON when it is ready; gives its pid and the JSON.

    The command ends with the context, or with this process.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "nereid", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        preexec_fn=end_with_parent(),
    )
    try:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            tail = f":\n{log_tail(Path(log.name))}" if log else ""
            raise SystemExit(f"nereid {words[0]} did not start{tail}")
        yield process.pid, json.loads(line)
    finally:
        _end(process)


@contextlib.contextmanager
def by_hand(
    module: str, environment: Mapping[str, str], python: str = sys.executable
) -> Iterator[tuple[int, int]]:
    """Run a module's `app` under uvicorn on a free port, and wait until it listens; gives its pid and port.

    Raises:
        ServerError: the service did not start.
    """
    (port,) = free_ports(1)
    words = ["--factory", "--port", str(port), "--no-access-log", "--log-level", "warning"]
    process = subprocess.Popen(
        [python, "-m", "uvicorn", f"{module}:app", *words],
        env=KEEP_BUFFERS | dict(environment),
        preexec_fn=end_with_parent(),
    )
    try:
        end_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None or time.monotonic() > end_s:
                raise ServerError("the service by hand did not start; its log is above")
            time.sleep(0.1)
        yield process.pid, port
    finally:
        _end(process)


def log_tail(log: Path) -> str:
    """Return the end of a log."""
    return log.read_text(errors="replace")[-LOG_CHARACTERS:]


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout:
        process.stdout.close()

"""Servers to measure: the real one, on free ports, for as long as a context lasts."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from nereid import assets
from nereid.server import embedded, run_dir

ANY_PORTS = [word for name in ("http", "grpc", "metrics", "health") for word in (f"--{name}-port", "0")]
# By then `nereid serve` has killed a server that does not stop.
END_S = embedded.STOP_TIMEOUT_S + 20.0
# So many characters of the log of one that does not start.
TOLD = 2000


@dataclass(frozen=True, slots=True)
class Supervised:
    """A running `nereid serve`: its process, and the environment in which its server is found."""

    pid: int
    environment: Mapping[str, str]
    repository: Path

    @property
    def record(self) -> run_dir.ServerRecord:
        """The server that runs now; after a restart it is another one."""
        found = run_dir.find(run_dir.root(self.environment), self.repository)
        assert found is not None, "nereid serve has ended"
        return found


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running `nereid gateway`: its process, and where it listens."""

    pid: int
    port: int


@contextlib.contextmanager
def served(
    folder: Path,
    environment: Mapping[str, str],
    profile: str = embedded.DEFAULT_PROFILE,
    repository: Path = assets.REPOSITORY,
    flags: Sequence[str] = (),
) -> Iterator[embedded.EmbeddedServer]:
    """Serve a repository until ready.

    Args:
        folder: takes what the server writes; several servers may share one.
        environment: to start the server from.
        flags: for `tritonserver`.
    """
    ports = embedded.Ports(*embedded.free_ports(3))
    options = embedded.ServerOptions(repository, profile, ports=ports, flags=tuple(flags))
    own = folder / f"server-{ports.http}"
    own.mkdir()
    with embedded.EmbeddedServer(options, own, environment) as server:
        yield server


@contextlib.contextmanager
def supervised(
    repository: Path, folder: Path, environment: Mapping[str, str], words: Sequence[str] = ()
) -> Iterator[Supervised]:
    """Run `nereid serve` on free ports, with a health port, until ready.

    Args:
        folder: takes what it logs, and its run directory.
        environment: to start it from.
        words: further ones of its command line.

    Raises:
        SystemExit: it does not start; with the end of its log.
    """
    environment = {**environment, "XDG_RUNTIME_DIR": str(folder)}
    command = ["serve", "--repository", str(repository), *ANY_PORTS, *words]
    with (folder / "log").open("w+") as log, _started(command, environment, log) as (pid, _):
        yield Supervised(pid, environment, repository)


@contextlib.contextmanager
def gateway(grpc_port: int) -> Iterator[Gateway]:
    """Run `nereid gateway` in front of a server of this machine, until it listens.

    Raises:
        SystemExit: it does not start.
    """
    command = ["gateway", "--url", f"127.0.0.1:{grpc_port}", "--port", "0"]
    with _started(command) as (pid, said):
        yield Gateway(pid, said["http"])


@contextlib.contextmanager
def _started(
    words: Sequence[str], environment: Mapping[str, str] | None = None, log: IO[str] | None = None
) -> Iterator[tuple[int, Any]]:
    """Run a command of `nereid` that says on one line, as JSON, when it is ready; returns its pid, and that.

    It ends with the context, or with this process.

    Args:
        environment: to start it from, if not this process's own.
        log: takes its stderr, if that is not shown.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "nereid", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        preexec_fn=partial(embedded.end_with_parent, os.getpid()),
    )
    try:
        assert process.stdout is not None
        if not (line := process.stdout.readline()):
            raise SystemExit(f"nereid {words[0]} did not start{_tail(log)}")
        yield process.pid, json.loads(line)
    finally:
        _end(process)


def _tail(log: IO[str] | None) -> str:
    if log is None:
        return ""
    log.seek(0)
    return f":\n{log.read()[-TOLD:]}"


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()

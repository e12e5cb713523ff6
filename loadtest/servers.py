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

from ops import embedded, run_dir

ANY_PORTS = [word for name in ("http", "grpc", "metrics", "health") for word in (f"--{name}-port", "0")]


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
        assert found is not None, "nereid serve is running"
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
    repository: Path = embedded.REPOSITORY,
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
    run_dir = folder / f"server-{ports.http}"
    run_dir.mkdir()
    with embedded.EmbeddedServer(options, run_dir, environment) as server:
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
    command = [sys.executable, "-m", "ops", "serve", "--repository", str(repository), *ANY_PORTS, *words]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise SystemExit((folder / "log").read_text()[-2000:])
        yield Supervised(process.pid, environment, repository)
    finally:
        _end(process)


@contextlib.contextmanager
def gateway(grpc_port: int) -> Iterator[Gateway]:
    """Run `nereid gateway` in front of a server of this machine, until it listens."""
    words = ["gateway", "--url", f"127.0.0.1:{grpc_port}", "--port", "0"]
    end_with_parent = partial(embedded.end_with_parent, os.getpid())
    process = subprocess.Popen(
        [sys.executable, "-m", "ops", *words], stdout=subprocess.PIPE, text=True, preexec_fn=end_with_parent
    )
    try:
        assert process.stdout is not None
        yield Gateway(process.pid, json.loads(process.stdout.readline())["http"])
    finally:
        _end(process)


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()

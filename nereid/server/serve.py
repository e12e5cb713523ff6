"""`nereid serve`: the embedded server in the foreground, supervised, until a signal."""

import contextlib
import json
import secrets
import signal
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from nereid.back_off import BackOff
from nereid.repository.layout import describe_threads, thread_budget
from nereid.server import health as health_page
from nereid.server import run_dir
from nereid.server.embedded import (
    DEFAULT_PROFILE,
    LOOPBACK,
    PLAIN_PROFILE,
    EmbeddedServer,
    Ports,
    ServerError,
    ServerOptions,
    free_ports,
    why_unusable,
)
from nereid.server.health import Health
from nereid.server.supervisor import Supervisor
from nereid.serving_errors import InvalidConfig

# By these tritonserver listens on other addresses; it takes their first letters for them, too.
LISTENING = ("http-address", "grpc-address", "allow-sagemaker", "allow-vertex-ai")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A signal that another thread takes, or that comes just before a wait, does not end the main thread's wait.
SIGNAL_LOOK_S = 0.5
RESTART_DELAYS_S, CALM_S = (0.2, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0), 60.0
# A killed server's ports are free at once, one that was asked to end keeps them for about 3 s.
PORTS_FREE_S = 10.0


class _Stopped(BaseException):
    """A signal asked the server to stop."""


class _Signals:
    """Turns the first two signals into `_Stopped`, wherever the main thread is, and counts them."""

    def __init__(self) -> None:
        self.count = 0
        for each in SIGNALS:
            signal.signal(each, self._stop)

    def _stop(self, number: int, frame: FrameType | None) -> NoReturn:
        self.count += 1
        if self.count > 1:
            for each in SIGNALS:
                signal.signal(each, signal.SIG_IGN)
        raise _Stopped

    def sleep(self, seconds: float) -> None:
        """Sleep for so long, unless a signal comes."""
        deadline = time.monotonic() + seconds
        while (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, SIGNAL_LOOK_S))


def serve(
    options: ServerOptions,
    environment: Mapping[str, str],
    health_port: int | None = None,
    drain_s: float = 0.0,
) -> None:
    """Serve until SIGINT or SIGTERM; prints the ports as one JSON line on stdout once ready.

    A stub that dies is replaced, and so is the server. A second signal ends it at once instead of waiting
    for its requests.

    Args:
        options: what to serve, and where.
        environment: of this process.
        health_port: where the supervisor tells what it knows; 0 for any free port, None for nowhere.
        drain_s: how long to serve on after the first signal, while `/readyz` already says no.

    Raises:
        ServerError: the server cannot start, or a model failed to load.
    """
    signals, health = _Signals(), Health()
    options = replace(options, token=secrets.token_urlsafe(24))
    try:
        with contextlib.ExitStack() as stack:
            port = 0
            if health_port is not None:
                port = stack.enter_context(health_page.serve(health, options.host, health_port))
            options = replace(options, ports=_with_free_ports(options))
            folder = stack.enter_context(run_dir.occupy(run_dir.root(environment), options.repository))
            _Service(options, folder, environment, health, port, drain_s, signals).run()
    except _Stopped:
        _log("stopped")


@dataclass(frozen=True, slots=True)
class _Service:
    """One supervised server after the other, on the same ports."""

    options: ServerOptions
    folder: Path
    environment: Mapping[str, str]
    health: Health
    health_port: int
    drain_s: float
    signals: _Signals

    def run(self) -> NoReturn:
        began_s, among = time.monotonic(), None
        with EmbeddedServer(self.options, self.folder, self.environment, _log) as server:
            _log_threads(self.options)
            ready, reason = self._watch(server, is_first=True)
        back_off = BackOff(RESTART_DELAYS_S, CALM_S)
        while True:
            pause_s = back_off.next_s(time.monotonic() - began_s)
            _log(f"supervisor: {reason}; tritonserver is started again in {pause_s:g} s")
            self.health.enter(health_page.RESTARTING, reason.splitlines()[0])
            self.signals.sleep(pause_s)
            _wait_for_ports(self.options)
            began_s = time.monotonic()
            server = EmbeddedServer(self.options, self.folder, self.environment, _log, among)
            try:
                with server:
                    self.health.restarted()
                    _log(f"supervisor: tritonserver is ready again after {time.monotonic() - began_s:.1f} s")
                    ready, reason = self._watch(server, is_first=False)
                    among = None
            except ServerError as error:
                reason = f"tritonserver cannot be started: {error}"
                # What is on the disk may have become such that nothing starts: then, in turn, what was ready.
                among = ready if among is None and ready else None

    def _watch(self, server: EmbeddedServer, is_first: bool) -> tuple[Collection[str], str]:
        """Look after a server until it has ended; returns what was ready last, and why it ended."""
        options = self.options
        record = run_dir.ServerRecord(
            server.pid,
            options.host,
            options.ports,
            str(options.repository),
            options.profile,
            options.token,
            self.health_port,
            options.model_control_mode,
        )
        supervisor = Supervisor(server, record, self.health, _log)
        try:
            with supervisor:
                self._wait(supervisor, record, is_first)
        except _Stopped:
            server.stop(lambda: self.signals.count > 1 or supervisor.is_emptied())
            raise
        reason = supervisor.restart_reason or f"tritonserver ended by itself with status {server.poll()}"
        self.health.enter(health_page.RESTARTING, reason)
        server.stop(supervisor.is_emptied)
        return supervisor.ready or (), reason

    def _wait(self, supervisor: Supervisor, record: run_dir.ServerRecord, is_first: bool) -> None:
        """Say that the server is ready, and wait for its end; after a signal, for the drain time."""
        try:
            self.health.enter(health_page.RUNNING)
            run_dir.write(self.folder, record)
            if is_first:
                ports = asdict(record.ports) | ({"health": record.health_port} if record.health_port else {})
                print(json.dumps(ports), flush=True)
            while not supervisor.wait(SIGNAL_LOOK_S):
                if self.signals.count:
                    raise _Stopped
        except _Stopped:
            self.health.enter(health_page.STOPPING)
            self.signals.sleep(self.drain_s)
            raise


def check_options(options: ServerOptions) -> None:
    """Refuse what `tritonserver` would only complain about later.

    Raises:
        ValueError: no such repository, no model of it has the profile, or strangers could map memory.
    """
    if options.allow_shm and options.host not in LOOPBACK:
        raise ValueError(
            f"--allow-shm needs --host 127.0.0.1, got {options.host}: whoever may register shared memory can "
            "take over the model processes (CVE-2025-23319)"
        )
    if options.allow_shm and (flags := [flag for flag in options.flags if _makes_listen(flag)]):
        raise ValueError(
            f"--allow-shm is for {options.host} only, so it cannot be used with: {' '.join(flags)}"
        )
    repository, profile = options.repository, options.profile
    if not any(repository.glob("*/config.pbtxt")):
        raise ValueError(f"{repository} is no model repository: no MODEL/config.pbtxt in it")
    known = {PLAIN_PROFILE, *(path.stem for path in repository.glob("*/configs/*.pbtxt"))}
    if profile != DEFAULT_PROFILE and profile not in known:
        raise ValueError(f"no model has the profile '{profile}', known are: {', '.join(sorted(known))}")


def _makes_listen(flag: str) -> bool:
    name = flag.removeprefix("--").partition("=")[0]
    return flag.startswith("--") and any(each.startswith(name) for each in LISTENING)


def _with_free_ports(options: ServerOptions) -> Ports:
    asked = asdict(options.ports)
    free = iter(free_ports(len(asked)))
    return Ports(**{name: port or next(free) for name, port in asked.items()})


def _wait_for_ports(options: ServerOptions) -> None:
    """Wait until the ports of the server before are free; whoever starts the next says if they are not."""
    deadline = time.monotonic() + PORTS_FREE_S
    while time.monotonic() < deadline:
        if not any(why_unusable(options.host, port) for port in asdict(options.ports).values()):
            return
        time.sleep(0.1)


def _log_threads(options: ServerOptions) -> None:
    with contextlib.suppress(InvalidConfig):  # Triton says it better
        text, fits = describe_threads(thread_budget(options.repository, options.profile))
        _log(text if fits else f"warning: {text}")


def _log(line: str) -> None:
    # A reader that went away must not stop the server: Triton blocks when nobody takes its log.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)

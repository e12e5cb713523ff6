"""`nereid serve`: the embedded server in the foreground, supervised, until a signal."""

import contextlib
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from nereid.backends.triton import stub_memory, stub_processes
from nereid.base.errors import InvalidConfig, ServerError
from nereid.base.processes import (
    STOP_SIGNALS,
    BackOff,
    ReachedLimits,
    in_background,
    on_signals,
    raise_open_file_limit,
)
from nereid.base.task_registry import TASKS
from nereid.repository.instance_sizing import InstancePlan
from nereid.repository.repository_index import describe_threads, output_names, readable_configs, thread_budget
from nereid.server import request_traces, run_dir
from nereid.server.command_line import LOOPBACK_HOSTS, ServerOptions
from nereid.server.embedded_server import STOP_TIMEOUT_S, EmbeddedServer, image_models, unservable_models
from nereid.server.gateway_process import GatewayProcess, Launcher, gateway_of
from nereid.server.ports import Ports, free_ports, wait_until_free
from nereid.server.run_dir import ServerInfo
from nereid.server.supervision import health as health_page
from nereid.server.supervision.health import ServerHealth
from nereid.server.supervision.watchdog import Watchdog

# Time that killed processes need to exit.
KILLED_EXIT_TIMEOUT_S = 10.0
UNGUARDED = (
    "the ports are Triton's own, and any program that can reach them can crash the server with one request; "
    "--guard checks all requests"
)
# A signal that another thread receives, or that arrives just before a wait, does not end that wait.
SIGNAL_POLL_S = 1.0
# A killed server frees its ports immediately; one that shuts down, after about 3 s.
PORTS_FREE_TIMEOUT_S = 10.0
# Seconds for the last requests of a server that got SIGTERM from another program. Clients with open
# connections keep sending, and Triton 24.10 would wait 30 s for them without accepting new connections.
LAST_REQUESTS_WAIT_S = 1.0
# Seconds for a server that crashed to write its stack to the log.
STACK_TIMEOUT_S = 5.0
# `tritonserver` and its stubs open about 150; the rest is for connections.
MIN_OPEN_FILES = 256
# Seconds that background jobs have to stop.
JOB_STOP_TIMEOUT_S = 2.0


def wait_for_orphans(run_root: Path, repository: Path, log: Callable[[str], None]) -> None:
    """Wait until servers of the repository whose supervisor was killed have answered their last requests.

    They exit on their own and hold their ports until then; one that hangs is killed. A server that waits for
    an idle connection exits without its stubs, which exit a moment later.
    """
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for pid, folder in run_dir.orphans(run_root, repository):
        log(f"waiting for the server with pid {pid} to exit; its supervisor was killed")
        stubs = [stub.process for stub in stub_processes.find(pid, repository)]
        while _runs_yet(pid, folder, stubs) and time.monotonic() < deadline + KILLED_EXIT_TIMEOUT_S:
            if time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # with its stubs
            time.sleep(0.1)


def _runs_yet(pid: int, folder: Path, stubs: list[stub_processes.Process]) -> bool:
    if run_dir.is_server_of(pid, folder):
        return True
    left = stub_processes.states(stubs).values()
    return any(letter != stub_processes.ZOMBIE for letter in left)


@dataclass(frozen=True, slots=True)
class BackgroundJob:
    """Work for the served repository.

    Attributes:
        metrics: returns its samples for the supervisor's metrics page.
        run: runs until its event is set; None for no background work.
    """

    metrics: Callable[[], str]
    name: str = ""
    run: Callable[[threading.Event], object] | None = None


class _Stopped(BaseException):
    """A signal that stops the server."""


class _SignalHandler:
    """Turns the first two signals into `_Stopped` in the main thread, and counts them; ignores the rest."""

    def __init__(self) -> None:
        self.count = 0
        on_signals(self._stop, self._stop, then=signal.SIG_IGN)

    def _stop(self, signum: int) -> NoReturn:
        self.count += 1
        raise _Stopped

    def sleep(self, seconds: float) -> None:
        """Sleep until the time has passed or a signal arrives."""
        deadline = time.monotonic() + seconds
        while (remaining_s := deadline - time.monotonic()) > 0:
            time.sleep(min(remaining_s, SIGNAL_POLL_S))


def serve(
    options: ServerOptions,
    environment: Mapping[str, str],
    jobs: Sequence[BackgroundJob],
    launch: Launcher,
) -> None:
    """Serve until SIGINT or SIGTERM, and print the ports on stdout once the server is ready.

    The ports are printed as one JSON line, or as a sentence on a terminal. A stub or server that dies is
    replaced. A second signal stops the server without waiting for its requests. In explicit mode, a model
    that cannot be loaded is reported and left out.

    Raises:
        ServerError: the server cannot start, or no model can be loaded; if strict, a model failed to load.
    """
    signals, health = _SignalHandler(), ServerHealth()
    if 0 <= (most := raise_open_file_limit()) < MIN_OPEN_FILES:
        raise ServerError(
            f"expected a limit of at least {MIN_OPEN_FILES} open files, got {most}",
            f"ulimit -n {MIN_OPEN_FILES}",
        )
    root = run_dir.root(environment)
    _check_is_first(options, environment)
    try:
        with contextlib.ExitStack() as stack:
            metrics = [job.metrics for job in jobs]
            if options.health_port is not None:
                pages = partial(
                    health_page.page, health, more_metrics=lambda: "".join(page() for page in metrics)
                )
                port = stack.enter_context(
                    health_page.serve(pages, options.host, options.health_port, "health")
                )
                options = replace(options, health_port=port)
            options = replace(options, ports=_with_free_ports(options))
            wait_for_orphans(root, options.repository, log)
            folder = stack.enter_context(run_dir.occupy(root, options.repository))
            stub_memory.remove_stale()
            for job in jobs:
                if job.run:
                    stack.enter_context(in_background(job.name, job.run, JOB_STOP_TIMEOUT_S))
            if options.sampling:
                traces = request_traces.collecting(options, folder, log)
                metrics.append(stack.enter_context(traces))
            gateway = None
            if options.is_guarded:
                gateway = stack.enter_context(gateway_of(options, folder, launch, log))
            _Service(options, folder, environment, health, signals, gateway).run()
    except _Stopped:
        log("stopped")


@dataclass(frozen=True, slots=True)
class _Service:
    """A supervised server, restarted on the same ports when it exits."""

    options: ServerOptions
    folder: Path
    environment: Mapping[str, str]
    health: ServerHealth
    signals: _SignalHandler
    gateway: GatewayProcess | None
    limits: ReachedLimits = field(default_factory=ReachedLimits)

    def run(self) -> NoReturn:
        only_models, back_off = None, BackOff()
        back_off.record_start(time.monotonic())
        server, failed = self._start()
        with contextlib.ExitStack() as stack:
            stack.push(server)  # already entered
            _log_threads(self.options, server.instance_plan)
            if not self.options.is_guarded:
                log(f"{'note' if self.options.host in LOOPBACK_HOSTS else 'warning'}: {UNGUARDED}")
            ready, reason = self._supervise(server, failed)
        while True:
            pause_s = back_off.record_failure(time.monotonic())
            log(f"supervisor: {reason}; restart of tritonserver in {pause_s:g} s")
            self.health.enter(health_page.RESTARTING, reason)
            self.signals.sleep(pause_s)
            self._wait_for_ports()
            back_off.record_start(started_at := time.monotonic())
            # A model that failed at startup may have been repaired and loaded since.
            failed = {name: why for name, why in failed.items() if name not in ready}
            server = EmbeddedServer(self.options, self.folder, self.environment, log, only_models, failed)
            try:
                with server:
                    self.health.count("restarts_total")
                    log(
                        f"supervisor: tritonserver is ready again after {time.monotonic() - started_at:.1f} s"
                    )
                    ready, reason = self._supervise(server)
                    only_models = None
            except (ServerError, OSError, RuntimeError) as error:  # such as a full disk, or no free threads
                reason = f"tritonserver cannot be started: {error}"
                # A changed model on disk may prevent the start: try all models, then those that were ready.
                only_models = ready if only_models is None and ready else None

    def _start(self) -> tuple[EmbeddedServer, Mapping[str, str]]:
        """Start a server without the models that cannot be loaded; return it with their reasons."""
        failed = unservable_models(self.options)
        is_strict = self.options.is_strict or self.options.model_control_mode != "explicit"
        if failed and is_strict:
            raise ServerError("; ".join(failed.values()))
        while True:
            server = EmbeddedServer(self.options, self.folder, self.environment, log, excluded_models=failed)
            try:
                return server.__enter__(), failed
            except ServerError:
                new = server.log.failures
                if is_strict or not new.keys() - failed or not {*server.models} - new.keys():
                    raise
                failed |= new
                log(f"not loaded: {', '.join(new)}; the server restarts without them")
                self._wait_for_ports()

    def _supervise(
        self, server: EmbeddedServer, failed: Mapping[str, str] | None = None
    ) -> tuple[Collection[str], str]:
        """Supervise a server until it exits; return the models that were last ready, and the reason.

        At the first start, `failed` maps the models that could not be loaded to their reasons.
        """
        server_info = server.info()
        watchdog = Watchdog(server, self.health, log)
        try:
            run_dir.write(self.folder, server_info)
            if self.gateway:
                self.gateway.start()
            with watchdog:
                self._wait(watchdog, server_info, failed)
                status = server.poll()
                is_signalled = status is None and not watchdog.restart_reason
                is_crash = is_signalled and server.log.signal not in (0, *STOP_SIGNALS)
                end = f"exited on its own with status {status}"
                if is_crash:
                    end = f"crashed with signal {server.log.signal}"
                elif is_signalled:
                    end = "received a termination signal"
                reason = watchdog.restart_reason or f"tritonserver {end}"
                self.health.enter(health_page.RESTARTING, reason)
                if is_crash:
                    self._wait_for_end(server, STACK_TIMEOUT_S)
                elif is_signalled:  # perhaps also this process, and then it waits for all requests
                    self.signals.sleep(LAST_REQUESTS_WAIT_S)
        except _Stopped:
            server.stop(lambda: self.signals.count > 1 or watchdog.is_emptied())
            raise
        self._report_limits()
        server.stop(lambda: is_signalled or watchdog.is_emptied())
        return watchdog.ready, reason

    def _wait_for_end(self, server: EmbeddedServer, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while server.poll() is None and time.monotonic() < deadline:
            self.signals.sleep(0.1)

    def _wait_for_ports(self) -> None:
        if not self.options.is_guarded:  # otherwise the ports are the gateway's
            wait_until_free(self.options.host, self.options.ports, PORTS_FREE_TIMEOUT_S)

    def _report_limits(self) -> None:
        for text in filter(None, (self.limits.new_kills(), self.limits.new_refusals())):
            log(f"supervisor: {text}")

    def _wait(self, watchdog: Watchdog, server_info: ServerInfo, failed: Mapping[str, str] | None) -> None:
        """Announce the server, then wait until it exits, or for a signal and the drain time."""
        try:
            self.health.enter(health_page.RUNNING)
            if failed is not None:
                for model, reason in failed.items():
                    log(f"warning: '{model}' is not served: {reason}; fix it, then: nereid reload {model}")
                is_terminal = sys.stdout.isatty()
                show = partial(announcement, self.options) if is_terminal else ready_line
                print(show(server_info, failed), flush=True)
            while not watchdog.wait(SIGNAL_POLL_S):
                if self.signals.count:
                    raise _Stopped
                self._report_limits()
                if self.gateway:
                    self.health.record_gateway(self.gateway.keep())
        except _Stopped:
            self.health.enter(health_page.STOPPING)
            self.signals.sleep(self.options.drain_s)
            if self.gateway:
                self.gateway.stop(lambda: self.signals.count > 1)
            raise


def _check_is_first(options: ServerOptions, environment: Mapping[str, str]) -> None:
    ports = {*asdict(options.ports).values(), options.health_port}
    for server in run_dir.find_servers(run_dir.root(environment), options.repository):
        if shared := ports & {*server.all_ports.values()}:
            raise ServerError(
                f"a server of '{options.repository}' is already running on port {min(filter(None, shared))}: "
                f"pid {server.pid}",
                "nereid status shows it; a second one needs other ports: --http-port 0 --grpc-port 0 "
                "--metrics-port 0",
            )


def _with_free_ports(options: ServerOptions) -> Ports:
    chosen = asdict(options.ports)
    free = iter(free_ports(len(chosen)))
    return Ports(**{name: port or next(free) for name, port in chosen.items()})


def _log_threads(options: ServerOptions, instance_plan: InstancePlan) -> None:
    if instance_plan.counts:
        log(str(instance_plan))
    with contextlib.suppress(InvalidConfig):  # Triton's message is better
        text, fits = describe_threads(
            thread_budget(options.repository, options.profile, instance_plan.counts)
        )
        log(text if fits else f"warning: {text}")


def log(line: str) -> None:
    """Write a line to stderr."""
    # Triton blocks if its log is not read, so a closed stderr must not stop the server.
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def ready_line(server_info: ServerInfo, failed: Mapping[str, str]) -> str:
    """Return the ports as JSON, for programs; `not_served` lists models that could not be loaded, and why."""
    return json.dumps(server_info.all_ports | ({"not_served": dict(failed)} if failed else {}))


def announcement(options: ServerOptions, server_info: ServerInfo, failed: Collection[str] = ()) -> str:
    """Return the addresses, a request to try and the models that are not served, as readable text."""
    host = run_dir.reachable(server_info.host)
    addresses = ", ".join(f"{name} {host}:{port}" for name, port in server_info.all_ports.items())
    needs_key = options.requires_keys or (options.is_guarded and options.host not in LOOPBACK_HOSTS)
    key = "NEREID_KEY=KEY " if needs_key else ""
    command = _command(options, [name for name in image_models(options) if name not in failed])
    attempt = (
        f"{key}{command}" if command else f"curl -i http://{host}:{server_info.ports.http}/v2/health/ready"
    )
    missing = f"; not served: {', '.join(failed)}" if failed else ""
    return f"ready: {addresses}{missing}; try: {attempt}; stop: Ctrl-C"


def _command(options: ServerOptions, models: Collection[str]) -> str:
    """Return the command that sends an image to one of the models, "" if there is none."""
    configs = readable_configs(options.repository, options.profile)
    for task in TASKS:
        # A config may leave its outputs to the file.
        matches = [name for name in models if {*task.outputs} <= {*output_names(configs[name])}]
        if task.command and not task.extends and matches:
            args = ["nereid", task.name, "IMAGE"]
            args += ["--model", matches[0]] * (task.model not in matches)
            is_own = options.repository.resolve() == task.default_repository.resolve()
            return shlex.join(args if is_own else [*args, "--repository", str(options.repository)])
    return ""

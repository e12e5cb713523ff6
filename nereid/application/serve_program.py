"""The product: a supervised server with its gateway, rollouts, and reports of drift and of its processes."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from nereid.application import launcher
from nereid.application.gateway_program import default_workers, gateway
from nereid.base.errors import WrongUsage, value_errors_as_wrong_usage
from nereid.base.processes import end_with_parent
from nereid.gateway.key_changes import open_ring
from nereid.gateway.keys import check_ring
from nereid.gateway.settings import GatewayOptions, GatewaySettings
from nereid.insight.drift import monitor
from nereid.models.rollout import service
from nereid.server import gpu_profile, nvidia_smi, run_dir
from nereid.server import serve as server
from nereid.server.command_line import AUTO_PROFILE, LOOPBACK_HOSTS, ServerOptions, check_options
from nereid.server.gpu_profile import check_named_gpus
from nereid.server.serve import BackgroundJob
from nereid.server.supervision import process_usage
from nereid.server.supervision.process_usage import ProcessMetrics


def serve(options: ServerOptions, environment: Mapping[str, str]) -> None:
    """Serve a repository until SIGINT or SIGTERM: see `nereid.server.serve.serve`.

    Raises:
        WrongUsage: the options conflict with each other, or this machine has no such profile or GPU.
        ServerError: the server cannot start.
    """
    with value_errors_as_wrong_usage():
        if options.gpu_ids:
            environment = {**environment, **nvidia_smi.select(options.gpu_ids, environment)}
        if options.profile == AUTO_PROFILE:
            choice = gpu_profile.choose(options.repository, environment)
            check_named_gpus(options.gpu_ids, choice)
            server.log(str(choice))
            options = replace(options, profile=choice.profile)
        check_options(options)
        _check_access(options, environment)
    jobs = _jobs(options.repository, run_dir.root(environment))
    server.serve(options, environment, jobs, partial(_launch_gateway, environment))


def _check_access(options: ServerOptions, environment: Mapping[str, str]) -> None:
    """Check that only callers with a key or a token reach a server from elsewhere.

    Raises:
        WrongUsage, ValueError: the options open the server, or there are no keys.
    """
    if not options.token and options.host not in LOOPBACK_HOSTS:
        raise WrongUsage(f"--no-token needs --host 127.0.0.1, got {options.host}: anybody could load models")
    if options.requires_keys and not options.is_guarded:
        raise WrongUsage("--require-keys and --unguarded exclude each other")
    if options.is_guarded:
        settings = GatewaySettings(host=options.host, keys_needed=options.requires_keys)
        check_ring(open_ring(options.keys, environment), settings)


def _jobs(repository: Path, run_root: Path) -> list[BackgroundJob]:
    """Return the background jobs of a served repository, and those that report about it."""

    def find() -> monitor.MonitoredServer | None:
        server_info, folder = run_dir.find(run_root, repository), run_dir.find_folder(run_root, repository)
        return (server_info, folder) if server_info and folder else None

    watcher = monitor.Monitor(repository, find, server.log)
    rollouts = partial(service.run, repository, lambda: run_dir.find(run_root, repository), log=server.log)
    return [
        BackgroundJob(partial(service.metrics, repository), "rollouts", rollouts),
        BackgroundJob(ProcessMetrics(partial(process_usage.read, os.getpid(), repository)).page),
        BackgroundJob(lambda: monitor.metrics(watcher.state), "drift", partial(monitor.watch, watcher)),
    ]


def _launch_gateway(environment: Mapping[str, str], options: ServerOptions) -> "subprocess.Popen[str]":
    return launcher.start(
        gateway,
        GatewayOptions(
            repository=options.repository,
            host=options.host,
            port=options.ports.http,
            grpc_port=options.ports.grpc,
            workers=default_workers(),
            keys=options.keys,
            keys_needed=options.requires_keys,
        ),
        env=dict(environment),
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches only this process, which stops both in order
        preexec_fn=end_with_parent(),
    )

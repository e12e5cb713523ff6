"""The product: a supervised server with its gateway, rollouts, and reports of drift and of its processes."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from nereid.application import launcher
from nereid.application.gateway_program import GatewayOptions, default_workers, gateway
from nereid.base.errors import WrongUsage, value_errors_as_wrong_usage
from nereid.base.processes import end_with_parent
from nereid.gateway.key_changes import open_ring
from nereid.gateway.keys import check_ring
from nereid.gateway.settings import GatewaySettings, ListenOptions
from nereid.insight.drift import monitor
from nereid.models.rollout import service
from nereid.server import gpu_profile, nvidia_smi, run_dir
from nereid.server import serve as server
from nereid.server.command_line import AUTO_PROFILE, LOOPBACK_HOSTS, TritonOptions, check_options
from nereid.server.gpu_profile import check_named_gpus
from nereid.server.serve import BackgroundJob, ServeOptions
from nereid.server.supervision import process_usage
from nereid.server.supervision.process_usage import ProcessMetrics


def serve(serve_options: ServeOptions, environment: Mapping[str, str]) -> None:
    """Serve a repository until SIGINT or SIGTERM: see `nereid.server.serve.serve`.

    Raises:
        WrongUsage: the options conflict with each other, or this machine has no such profile or GPU.
        ServerError: the server cannot start.
    """
    with value_errors_as_wrong_usage():
        if serve_options.gpu_id:
            environment = {**environment, **nvidia_smi.select(serve_options.gpu_id, environment)}
        serve_options = replace(serve_options, server=_with_profile(serve_options, environment))
        check_options(serve_options.server)
        _check_access(serve_options, environment)
    repository, run_root = serve_options.server.repository, run_dir.root(environment)
    launch = partial(_launch_gateway, serve_options.keys, environment)
    server.serve(serve_options, environment, _jobs(repository, run_root), launch)


def _with_profile(serve_options: ServeOptions, environment: Mapping[str, str]) -> TritonOptions:
    """Return the options of the server with a profile other than `auto`, and log how it was selected.

    Raises:
        ValueError: GPUs are named, and the selected profile does not use them.
    """
    options = serve_options.server
    if options.profile != AUTO_PROFILE:
        return options
    choice = gpu_profile.choose(options.repository, environment)
    check_named_gpus(serve_options.gpu_id, choice)
    server.log(str(choice))
    return replace(options, profile=choice.profile)


def _check_access(serve_options: ServeOptions, environment: Mapping[str, str]) -> None:
    """Check that only callers with a key or a token reach a server from elsewhere.

    Raises:
        WrongUsage, ValueError: the options open the server, or there are no keys.
    """
    options = serve_options.server
    if serve_options.has_open_admin_api and options.host not in LOOPBACK_HOSTS:
        raise WrongUsage(f"--no-token needs --host 127.0.0.1, got {options.host}: anybody could load models")
    if options.requires_keys and not options.is_guarded:
        raise WrongUsage("--require-keys and --unguarded exclude each other")
    if options.is_guarded:
        settings = GatewaySettings(host=options.host, keys_needed=options.requires_keys)
        check_ring(open_ring(serve_options.keys, environment), settings)


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


def _launch_gateway(
    keys: Path | None, environment: Mapping[str, str], options: TritonOptions
) -> "subprocess.Popen[str]":
    return launcher.start(
        gateway,
        GatewayOptions(
            ListenOptions(options.host, options.ports.http, options.ports.grpc, workers=default_workers()),
            GatewaySettings(host=options.host, keys_needed=options.requires_keys),
            options.repository,
            keys=keys,
        ),
        env=dict(environment),
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches only this process, which stops both in order
        preexec_fn=end_with_parent(),
    )

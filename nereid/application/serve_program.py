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
from nereid.gateway.settings import Listen, Settings
from nereid.insight.drift import monitor
from nereid.models.rollout import service
from nereid.server import nvidia_smi, run_dir
from nereid.server import serve as server
from nereid.server.command_line import AUTO_PROFILE, LOOPBACK_HOSTS, TritonOptions, check_options
from nereid.server.gpu_profile import check_named_gpus, choose
from nereid.server.serve import BackgroundJob, ServeOptions
from nereid.server.supervision.process_usage import ProcessMetrics, read


def serve(options: ServeOptions, environment: Mapping[str, str]) -> None:
    """Serve a repository until SIGINT or SIGTERM: see `nereid.server.serve.serve`.

    Raises:
        WrongUsage: the options conflict with each other, or this machine has no such profile or GPU.
        ServerError: the server cannot start.
    """
    with value_errors_as_wrong_usage():
        if options.gpu_id:
            environment = {**environment, **nvidia_smi.select(options.gpu_id, environment)}
        options = replace(options, server=_with_profile(options, environment))
        check_options(options.server)
        _check_access(options, environment)
    repository, base = options.server.repository, run_dir.root(environment)
    launch = partial(_launch_gateway, options.keys, environment)
    server.serve(options, environment, _jobs(repository, base), launch)


def _with_profile(options: ServeOptions, environment: Mapping[str, str]) -> TritonOptions:
    """Return the options of the server with a profile other than `auto`, and log how it was selected.

    Raises:
        ValueError: GPUs are named, and the selected profile does not use them.
    """
    given = options.server
    if given.profile != AUTO_PROFILE:
        return given
    choice = choose(given.repository, environment)
    check_named_gpus(options.gpu_id, choice)
    server.log(str(choice))
    return replace(given, profile=choice.profile)


def _check_access(options: ServeOptions, environment: Mapping[str, str]) -> None:
    """Check that only callers with a key or a token reach a server from elsewhere.

    Raises:
        WrongUsage, ValueError: the options open the server, or there are no keys.
    """
    given = options.server
    if options.has_open_admin_api and given.host not in LOOPBACK_HOSTS:
        raise WrongUsage(f"--no-token needs --host 127.0.0.1, got {given.host}: anybody could load models")
    if given.requires_keys and not given.is_guarded:
        raise WrongUsage("--require-keys and --unguarded exclude each other")
    if given.is_guarded:
        settings = Settings(host=given.host, keys_needed=given.requires_keys)
        check_ring(open_ring(options.keys, environment), settings)


def _jobs(repository: Path, base: Path) -> list[BackgroundJob]:
    """Return the background jobs of a served repository, and those that report about it."""

    def find() -> monitor.Server | None:
        record, folder = run_dir.find(base, repository), run_dir.find_folder(base, repository)
        return monitor.Server(record, folder) if record and folder else None

    watcher = monitor.Monitor(repository, find, server.log)
    rollouts = partial(service.run, repository, lambda: run_dir.find(base, repository), log=server.log)
    return [
        BackgroundJob(partial(service.metrics, repository), "rollouts", rollouts),
        BackgroundJob(ProcessMetrics(partial(read, os.getpid(), repository)).page),
        BackgroundJob(lambda: monitor.metrics(watcher.state), "drift", partial(monitor.watch, watcher)),
    ]


def _launch_gateway(
    keys: Path | None, environment: Mapping[str, str], options: TritonOptions
) -> "subprocess.Popen[str]":
    return launcher.start(
        gateway,
        GatewayOptions(
            Listen(options.host, options.ports.http, options.ports.grpc, workers=default_workers()),
            Settings(host=options.host, keys_needed=options.requires_keys),
            options.repository,
            keys=keys,
        ),
        env=dict(environment),
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches only this process, which stops both in order
        preexec_fn=end_with_parent(),
    )

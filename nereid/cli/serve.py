"""`nereid serve`: serve a model repository in the foreground."""

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nereid.assets import REPOSITORY
from nereid.cli.keys import KeysFile
from nereid.cli.options import (
    Profile,
    Repository,
    Task,
    environment,
    invalid_values,
    repository_of,
    show_progress,
)
from nereid.contract import GRPC_PORT, HTTP_PORT, METRICS_PORT
from nereid.errors import WrongUsage
from nereid.server.command_line import (
    AUTO_PROFILE,
    LOOPBACK,
    ServerOptions,
    check_options,
    read_token,
)
from nereid.server.ports import Ports

if TYPE_CHECKING:
    from nereid.server.run_dir import ServerRecord
    from nereid.server.serve import Companion

ControlMode = Literal["explicit", "poll", "none"]


def serve(
    context: typer.Context,
    flags: Annotated[
        list[str] | None,
        typer.Argument(help="Flags that are passed to tritonserver, after `--`.", metavar="-- FLAG"),
    ] = None,
    repository: Repository = REPOSITORY,
    task: Task = None,
    profile: Profile = AUTO_PROFILE,
    gpu_id: Annotated[
        str,
        typer.Option(
            help="GPUs to use: indexes of nvidia-smi or UUIDs, separated by commas. The option replaces "
            "CUDA_VISIBLE_DEVICES.",
            metavar="ID[,ID]",
            show_default="all that CUDA shows",
        ),
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(help="HTTP port; 0 selects a free port.", min=0, max=65535)
    ] = HTTP_PORT,
    grpc_port: Annotated[
        int, typer.Option(help="gRPC port; 0 selects a free port.", min=0, max=65535)
    ] = GRPC_PORT,
    metrics_port: Annotated[
        int, typer.Option(help="Metrics port; 0 selects a free port.", min=0, max=65535)
    ] = METRICS_PORT,
    model_control_mode: Annotated[
        ControlMode,
        typer.Option(
            help="How models are loaded and unloaded: by commands (`explicit`), by watching the repository "
            "(`poll`), or never after the start (`none`)."
        ),
    ] = "explicit",
    health_port: Annotated[
        int | None,
        typer.Option(
            help="Port of /livez, /readyz and the supervisor's /metrics; 0 selects a free port.",
            min=0,
            max=65535,
            show_default="none",
        ),
    ] = None,
    drain_s: Annotated[
        float,
        typer.Option(help="Seconds to continue serving after SIGTERM, while /readyz reports 503.", min=0),
    ] = 0.0,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="End if a model cannot be loaded, instead of serving the others."),
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token of the administrative APIs, for other tools than `nereid`.",
            show_default="a random token",
        ),
    ] = None,
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token", help="Open the administrative APIs to everybody on this machine; loopback only."
        ),
    ] = False,
    allow_shm: Annotated[
        bool,
        typer.Option("--allow-shm", help="Let clients on this machine register shared memory regions."),
    ] = False,
    guard: Annotated[
        bool | None,
        typer.Option(
            "--guard/--unguarded",
            help="Whether a gateway checks all requests, and Triton itself has no port. A request to an "
            "unguarded server can end it.",
            show_default="guarded, except on loopback",
        ),
    ] = None,
    keys_file: KeysFile = None,
    require_keys: Annotated[
        bool,
        typer.Option(
            "--require-keys",
            help="Require a key on loopback, too, for example behind a proxy. Implies --guard.",
        ),
    ] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace/--no-trace", help="Whether the stages of each request are recorded, for `nereid why`."
        ),
    ] = True,
    trace_share: Annotated[
        float, typer.Option(help="Share of the traces that are kept without another reason.", min=0, max=1)
    ] = 0.01,
    objective_ms: Annotated[
        float,
        typer.Option(
            help="Latency objective in milliseconds. Traces of slower requests, failures and forced variants "
            "are always kept.",
            min=0.001,
        ),
    ] = 250.0,
    otlp: Annotated[
        str,
        typer.Option(
            help="Address of an OTLP receiver over HTTP for kept traces, such as http://localhost:4318.",
            show_default="none",
        ),
    ] = "",
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log each request on stderr as one line of JSON.")
    ] = False,
    signals: Annotated[
        bool,
        typer.Option(
            "--signals/--no-signals",
            help="Whether brightness, confidence and other signals of images and responses are measured, for "
            "`nereid drift`.",
        ),
    ] = True,
) -> None:
    """Serve a model repository until Ctrl-C.

    When every model answers, a terminal shows the addresses. A pipe gets them as one line of JSON on
    stdout. The log goes to stderr. Processes that die or hang are replaced.

    On 127.0.0.1 the ports are Triton's own, for programs that you trust. On other addresses a gateway has the
    ports: it checks every request, and every request needs a key.
    """
    from nereid.server import serve as server
    from nereid.server.request_traces import TraceOptions
    from nereid.tracing.records import Sampling

    if otlp and not re.fullmatch(r"https?://[^/\s]+\S*", otlp):
        raise WrongUsage(f"--otlp: expected an address such as http://localhost:4318, got '{otlp[:128]}'")
    if not trace and (otlp or access_log):
        raise WrongUsage("--no-trace excludes --otlp and --access-log")
    ports = Ports(http_port, grpc_port, metrics_port)
    served, variables = repository_of(context, repository, task).resolve(), environment(context)
    with invalid_values():
        variables = with_gpus(variables, gpu_id)
        profile = choose_profile(profile, served, variables, gpu_id)
    options = ServerOptions(
        served,
        profile,
        host,
        ports,
        model_control_mode,
        allow_shm=allow_shm,
        is_guarded=(require_keys or host not in LOOPBACK) if guard is None else guard,
        requires_keys=require_keys,
        measures_signals=signals,
        flags=tuple(flags or ()),
    )
    with invalid_values():
        check_options(options)
        token = read_token(token_file) if token_file else None
    if no_token:
        if token_file:
            raise WrongUsage("--token-file and --no-token exclude each other")
        if host not in LOOPBACK:
            raise WrongUsage(f"--no-token needs --host 127.0.0.1, got {host}: anybody could load models")
        token = ""
    if require_keys and not options.is_guarded:
        raise WrongUsage("--require-keys and --unguarded exclude each other")
    if options.is_guarded:
        check_keys(options, keys_file, variables)
    server.serve(
        options,
        variables,
        health_port,
        drain_s,
        strict,
        token,
        keys_file,
        [_rollouts(options, context), _processes(options), _drift(options, context)],
        TraceOptions(Sampling(trace_share, objective_ms / 1e3), otlp, access_log) if trace else None,
    )


def with_gpus(variables: Mapping[str, str], gpu_id: str) -> Mapping[str, str]:
    """Return the environment of a server that uses the GPUs `gpu_id`; empty for those that CUDA shows.

    Raises:
        ValueError: this machine has no such GPU.
    """
    if not gpu_id:
        return variables
    from nereid.server.gpu import selection

    return {**variables, **selection.select(gpu_id, variables)}


def choose_profile(profile: str, repository: Path, variables: Mapping[str, str], gpu_id: str) -> str:
    """Return a profile other than `auto`, and log how it was selected.

    Raises:
        ValueError: GPUs are named, and the selected profile does not use them.
    """
    if profile != AUTO_PROFILE:
        return profile
    from nereid.server.gpu.profile_choice import check_named_gpus, choose

    choice = choose(repository, variables)
    check_named_gpus(gpu_id, choice)
    show_progress(str(choice))
    return choice.profile


def _rollouts(options: ServerOptions, context: typer.Context) -> "Companion":
    """Return what carries out the rollouts of a served repository."""
    from nereid.rollout import service
    from nereid.server import run_dir
    from nereid.server.serve import Companion

    def find() -> "ServerRecord | None":
        return run_dir.find(run_dir.root(environment(context)), options.repository)

    repository = options.repository
    return Companion(partial(service.in_background, repository, find), partial(service.metrics, repository))


def _processes(options: ServerOptions) -> "Companion":
    """Return what reports CPU time and memory of the processes of a served repository."""
    from nereid.server.serve import Companion
    from nereid.server.supervision.process_usage import ProcessMetrics, read

    metrics = ProcessMetrics(partial(read, os.getpid(), options.repository))
    return Companion(lambda log: contextlib.nullcontext(), metrics.page)


def _drift(options: ServerOptions, context: typer.Context) -> "Companion":
    """Return what compares the traffic of a served repository with its references."""
    from nereid.drift import drift_metrics, monitor
    from nereid.server import run_dir
    from nereid.server.serve import Companion

    base, repository = run_dir.root(environment(context)), options.repository

    def find() -> monitor.Server | None:
        record, folder = run_dir.find(base, repository), run_dir.find_folder(base, repository)
        return monitor.Server(record, folder) if record and folder else None

    def running(log: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
        watcher.log = log
        return monitor.in_background(watcher)

    watcher = monitor.Monitor(repository, find, print)
    return Companion(running, lambda: drift_metrics.metrics(watcher.state))


def check_keys(options: ServerOptions, file: Path | None, environment: Mapping[str, str]) -> None:
    """Check that a guarded server has keys, if its address needs some.

    Raises:
        WrongUsage: there are none.
    """
    from nereid.gateway.admission.access import check_ring
    from nereid.gateway.admission.key_changes import open_ring
    from nereid.gateway.settings import Settings

    settings = Settings(host=options.host, keys_needed=options.requires_keys)
    try:
        check_ring(open_ring(file, environment), settings)
    except ValueError as error:
        raise WrongUsage(str(error)) from None

"""`nereid serve`: serve a model repository in the foreground."""

import os
import re
import secrets
from pathlib import Path
from typing import Annotated, Literal

import typer

from nereid.base.assets import REPOSITORY
from nereid.base.contract import GRPC_PORT, HTTP_PORT, METRICS_PORT
from nereid.base.errors import WrongUsage, value_errors_as_wrong_usage
from nereid.cli.keys import KeysFile
from nereid.cli.options import AccessLog, Profile, Repository, Task, environment, port, repository_of
from nereid.server.command_line import AUTO_PROFILE, LOOPBACK_HOSTS, ServerOptions, read_own_token
from nereid.server.ports import Ports

ControlMode = Literal["explicit", "poll", "none"]


def serve(
    context: typer.Context,
    flags: Annotated[
        list[str] | None,
        typer.Argument(help="Flags for tritonserver, after `--`.", metavar="-- FLAG"),
    ] = None,
    repository: Repository = REPOSITORY,
    task: Task = None,
    profile: Profile = AUTO_PROFILE,
    gpu_id: Annotated[
        str,
        typer.Option(
            help="GPUs to use: nvidia-smi indexes or UUIDs, separated by commas. Overrides "
            "CUDA_VISIBLE_DEVICES.",
            metavar="ID[,ID]",
            show_default="all that CUDA can see",
        ),
    ] = "",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, port("HTTP port")] = HTTP_PORT,
    grpc_port: Annotated[int, port("gRPC port")] = GRPC_PORT,
    metrics_port: Annotated[int, port("Metrics port")] = METRICS_PORT,
    model_control_mode: Annotated[
        ControlMode,
        typer.Option(
            help="How models are loaded and unloaded: by commands (`explicit`), by watching the repository "
            "(`poll`), or never after the start (`none`)."
        ),
    ] = "explicit",
    health_port: Annotated[
        int | None, port("Port of /livez, /readyz and the supervisor's /metrics", show_default="none")
    ] = None,
    drain_s: Annotated[
        float,
        typer.Option(help="Seconds to keep serving after SIGTERM, while /readyz returns 503.", min=0),
    ] = 0.0,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit if a model cannot be loaded, instead of serving the others."),
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token for the administrative APIs, for tools other than `nereid`.",
            show_default="a random token",
        ),
    ] = None,
    no_token: Annotated[
        bool,
        typer.Option(
            "--no-token", help="Leave the administrative APIs open to anyone on this machine; loopback only."
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
            help="Put a gateway in front of Triton and close Triton's own ports. Without it, a malformed "
            "request can crash the server.",
            show_default="guarded, except on loopback",
        ),
    ] = None,
    keys_file: KeysFile = None,
    require_keys: Annotated[
        bool,
        typer.Option(
            "--require-keys",
            help="Require a key even on loopback, for example behind a proxy. Implies --guard.",
        ),
    ] = False,
    trace: Annotated[
        bool,
        typer.Option("--trace/--no-trace", help="Record the stages of each request, for `nereid why`."),
    ] = True,
    trace_share: Annotated[
        float, typer.Option(help="Fraction of ordinary traces to keep.", min=0, max=1)
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
            help="OTLP receiver over HTTP to export kept traces to, such as http://localhost:4318.",
            show_default="none",
        ),
    ] = "",
    access_log: AccessLog = False,
    signals: Annotated[
        bool,
        typer.Option(
            "--signals/--no-signals",
            help="Measure signals of images and responses, such as brightness, for `nereid drift`.",
        ),
    ] = True,
) -> None:
    """Serve a model repository until Ctrl-C.

    Once every model answers, the addresses are printed on stdout: as text on a terminal, as one line of JSON
    to a pipe. The log goes to stderr. Processes that die or hang are replaced.

    On 127.0.0.1, the ports are Triton's own, for programs that you trust. On other addresses, the ports
    belong to a gateway, which checks every request and requires a key.
    """
    from nereid.application import serve_program
    from nereid.base.tracing.records import Sampling

    if otlp and not re.fullmatch(r"https?://[^/\s]+\S*", otlp):
        raise WrongUsage(f"--otlp: expected an address such as http://localhost:4318, got '{otlp[:128]}'")
    if not trace and (otlp or access_log):
        raise WrongUsage("--no-trace excludes --otlp and --access-log")
    if no_token and token_file:
        raise WrongUsage("--token-file and --no-token exclude each other")
    with value_errors_as_wrong_usage():
        token = read_own_token(token_file) if token_file else secrets.token_urlsafe(24)
    options = ServerOptions(
        Path(os.path.realpath(repository_of(context, repository, task))),
        profile,
        host,
        Ports(http_port, grpc_port, metrics_port),
        model_control_mode,
        "" if no_token else token,
        allow_shm=allow_shm,
        is_guarded=(require_keys or host not in LOOPBACK_HOSTS) if guard is None else guard,
        requires_keys=require_keys,
        # Only our commands know a random token, and flags of Triton may name other models.
        allows_incomplete_configs=no_token or bool(token_file or flags),
        sampling=Sampling(trace_share, objective_ms / 1e3) if trace else None,
        measures_signals=signals,
        flags=tuple(flags or ()),
        health_port=health_port,
        drain_s=drain_s,
        is_strict=strict,
        keys=keys_file,
        otlp=otlp,
        logs_requests=access_log,
        gpu_ids=gpu_id,
    )
    serve_program.serve(options, environment(context))

"""`nereid gateway`: the REST API and the web page in front of a server."""

import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated

import typer

from nereid.assets import REPOSITORY
from nereid.cli.keys import KeysFile
from nereid.cli.options import (
    DEFAULT_MODEL,
    Repository,
    Task,
    complete_model,
    environment,
    find_any_model,
    invalid_values,
    repository_of,
)
from nereid.cli.server_options import find_server

# A worker needs about 0.7 ms of CPU for an image, and the models 7 ms and more.
CORES_PER_WORKER, MAX_WORKERS = 8, 64


def gateway(
    context: typer.Context,
    url: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of Triton's HTTP port.", show_default="the running server of the repository"
        ),
    ] = "",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Model that answers requests without a model's name. With --url, repeat it for further "
            "models; else all routes of the repository are offered.",
            autocompletion=complete_model,
            show_default="`classify`, or the first model of the repository",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="HTTP port; 0 selects a free port.", min=0, max=65535)] = 8080,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            help="Port of the v2 protocol over gRPC; 0 selects a free port.",
            min=0,
            max=65535,
            show_default="none",
        ),
    ] = None,
    keys_file: KeysFile = None,
    require_keys: Annotated[
        bool,
        typer.Option("--require-keys", help="Require a key on loopback, too, for example behind a proxy."),
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Quota in images per second of each key without a rate of its own.",
            min=0.001,
            show_default="unlimited",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Further host name that requests may use in their Host header. May be repeated.",
            show_default="own addresses on loopback, elsewhere any",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Further origin of web pages that may call this gateway. May be repeated.",
            show_default="the gateway's own page",
        ),
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="Certificate (PEM); turns HTTPS on.")] = None,
    certificate_key: Annotated[
        Path | None,
        typer.Option(help="Private key of the certificate (PEM).", show_default="in the certificate's file"),
    ] = None,
    keep_alive_s: Annotated[
        int,
        typer.Option(
            help="Seconds after which an unused connection is closed; more than a load balancer's in front.",
            min=1,
        ),
    ] = 90,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of processes that share the ports, the quotas and the metrics.",
            min=1,
            max=MAX_WORKERS,
            show_default="1 for each 8 cores",
        ),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log each request on stderr as one line of JSON.")
    ] = False,
    repository: Repository = REPOSITORY,
    task: Task = None,
) -> None:
    """Serve a REST API, a web page and the checked v2 protocol in front of a running server, until Ctrl-C.

    When the gateway listens, it prints its ports as one line of JSON on stdout. On loopback, every caller may
    classify. Elsewhere every request needs a key. Changing a route's weights always needs a key.
    """
    from nereid.contract import HTTP_PORT
    from nereid.gateway.admission.key_changes import open_ring
    from nereid.gateway.http import serving
    from nereid.gateway.models import FixedModels, ModelSource
    from nereid.gateway.settings import Settings
    from nereid.processes import available_cores
    from nereid.rollout.gateway_models import RepositoryModels
    from nereid.tracing.records import DEFAULT_SAMPLING, Sampling

    repository = repository_of(context, repository, task)
    source: ModelSource
    if url:
        running, source = None, FixedModels(tuple(model or [DEFAULT_MODEL]), url)
    else:
        running = find_server(context, repository)
        model = [find_any_model(repository, name) for name in model or [""]]
        source = RepositoryModels(repository, lambda: find_server(context, repository), model)
    with invalid_values():
        settings = Settings(
            url=url or (running.url("http") if running else f"127.0.0.1:{HTTP_PORT}"),
            model=source.names()[0],
            host=host,
            keys_needed=require_keys,
            rate_per_s=rate,
            allowed_hosts=tuple(allowed_host or ()),
            cors_origins=tuple(cors_origin or ()),
            traces=running.traces if running else "",
            sampling=Sampling(running.trace_share, running.objective_ms / 1e3)
            if running
            else DEFAULT_SAMPLING,
            repository=None if url else repository,
        )
    with ExitStack() as stack:
        serving.serve(
            settings,
            serving.Listen(
                host,
                port,
                grpc_port,
                certificate,
                certificate_key,
                keep_alive_s,
                workers or max(1, available_cores() // CORES_PER_WORKER),
            ),
            open_ring(keys_file, environment(context)),
            source,
            _announcement(context, host, None if url else repository, stack),
            access_log,
        )


def _announcement(
    context: typer.Context, host: str, repository: Path | None, stack: ExitStack
) -> Callable[[dict[str, int]], None]:
    """Return a function that prints the ports, and records HTTP's for `status` until `stack` closes."""
    from nereid.errors import ServerError
    from nereid.server import run_dir

    def announce(ports: dict[str, int]) -> None:
        print(json.dumps(ports), flush=True)
        if repository:
            with suppress(ServerError, OSError):  # such as a read-only file system
                base = run_dir.root(environment(context))
                folder = stack.enter_context(run_dir.occupy(base, repository))
                run_dir.write(folder, run_dir.GatewayRecord(os.getpid(), host, ports["http"]))

    return announce

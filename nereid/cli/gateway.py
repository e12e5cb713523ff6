"""`nereid gateway`: the REST API and the web page in front of a server."""

from pathlib import Path
from typing import Annotated

import typer

from nereid.base.assets import REPOSITORY
from nereid.base.contract import HTTP_PORT
from nereid.base.errors import value_errors_as_wrong_usage
from nereid.base.task_registry import DEFAULT_TASK
from nereid.cli import options
from nereid.cli.keys import KeysFile
from nereid.cli.options import AccessLog, Repository, Task, complete_model, environment, repository_of
from nereid.cli.server_options import find_server
from nereid.gateway.settings import KEEP_ALIVE_S, GatewayOptions

MAX_WORKERS = 64


def gateway(
    context: typer.Context,
    url: Annotated[
        str,
        typer.Option(
            help="Triton's HTTP address, HOST:PORT.", show_default="the running server of the repository"
        ),
    ] = "",
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Default model, for requests that do not name one. With --url, repeat the option to offer "
            "more models; without it, all routes of the repository are offered.",
            autocompletion=complete_model,
            show_default=f"`{DEFAULT_TASK.model}`, or the first model of the repository",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, options.port("HTTP port")] = 8080,
    grpc_port: Annotated[
        int | None, options.port("Port of the v2 protocol over gRPC", show_default="none")
    ] = None,
    keys_file: KeysFile = None,
    require_keys: Annotated[
        bool,
        typer.Option("--require-keys", help="Require a key even on loopback, for example behind a proxy."),
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Default quota per key, in images per second; a rate in the key file overrides it.",
            min=0.001,
            show_default="unlimited",
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Additional host name to accept in the Host header. May be repeated.",
            show_default="its own addresses on loopback, any host name elsewhere",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Additional origin whose web pages may call this gateway. May be repeated.",
            show_default="the gateway's own page",
        ),
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="Certificate (PEM); enables HTTPS.")] = None,
    certificate_key: Annotated[
        Path | None,
        typer.Option(help="Private key of the certificate (PEM).", show_default="in the certificate file"),
    ] = None,
    keep_alive_s: Annotated[
        int,
        typer.Option(
            help="Idle connection timeout in seconds. Set it higher than your load balancer's.",
            min=1,
        ),
    ] = KEEP_ALIVE_S,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Number of processes that share the ports, the quotas and the metrics.",
            min=1,
            max=MAX_WORKERS,
            show_default="one per 8 cores",
        ),
    ] = None,
    access_log: AccessLog = False,
    repository: Repository = REPOSITORY,
    task: Task = None,
) -> None:
    """Serve a REST API, a web page and the checked v2 protocol in front of a running server, until Ctrl-C.

    Once the gateway is listening, it prints its ports as one line of JSON on stdout. On loopback, image
    requests need no key; elsewhere, they do. Changing a route or a rollout and publishing always need one.
    """
    from nereid.application import gateway_program

    served = repository_of(context, repository, task)
    if not url:
        find_server(context, served)  # notes that there are several
    with value_errors_as_wrong_usage():
        settings = GatewayOptions(
            url or f"127.0.0.1:{HTTP_PORT}",
            repository=None if url else served,
            models=tuple(model or ()),
            host=host,
            port=port,
            grpc_port=grpc_port,
            certificate=certificate,
            certificate_key=certificate_key,
            keep_alive_s=keep_alive_s,
            workers=workers or gateway_program.default_workers(),
            logs_requests=access_log,
            keys=keys_file,
            keys_needed=require_keys,
            rate_per_s=rate,
            allowed_hosts=tuple(allowed_host or ()),
            cors_origins=tuple(cors_origin or ()),
        )
    gateway_program.gateway(settings, environment(context))

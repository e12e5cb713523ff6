"""The `nereid` command: its table of commands, and the only place in `ops` that reads the environment."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nereid.assets import REPOSITORY
from nereid.cli import keys
from nereid.cli import publish as publish_commands
from nereid.cli import route as route_commands
from nereid.cli.options import FAILED, WRONG_USAGE, Repository, fail, find_server, reporting
from nereid.errors import ServerError
from nereid.server.command_line import DEFAULT_PROFILE, ServerOptions
from nereid.server.ports import Ports

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(route_commands.app, name="route")
app.add_typer(keys.app, name="key")
for command in (
    publish_commands.add,
    publish_commands.publish,
    publish_commands.rollback,
    publish_commands.retire,
    publish_commands.versions,
    publish_commands.watch,
):
    app.command()(command)

# Also `nereid.client.request.ProtocolName`, which would take the whole client to start a command.
Protocol = Literal["grpc", "http"]
Objective = Literal["throughput", "latency"]
ControlMode = Literal["explicit", "poll", "none"]


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value


@app.command()
def serve(
    flags: Annotated[list[str] | None, typer.Argument(help="After `--`: flags for tritonserver.")] = None,
    repository: Repository = REPOSITORY,
    profile: Annotated[
        str, typer.Option(help="`ensemble`, or the NAME of configs/NAME.pbtxt.")
    ] = DEFAULT_PROFILE,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 for any free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC port; 0 for any free one.", min=0, max=65535)] = 8001,
    metrics_port: Annotated[
        int, typer.Option(help="Metrics port; 0 for any free one.", min=0, max=65535)
    ] = 8002,
    model_control_mode: Annotated[ControlMode, typer.Option(help="Who loads models, and when.")] = "explicit",
    health_port: Annotated[
        int | None,
        typer.Option(
            help="Port for /livez, /readyz and the supervisor's /metrics; 0 for any free one.",
            min=0,
            max=65535,
            show_default="none",
        ),
    ] = None,
    drain_s: Annotated[
        float,
        typer.Option(help="Seconds to serve on after SIGTERM, while /readyz already says no.", min=0),
    ] = 0.0,
    allow_shm: Annotated[
        bool, typer.Option("--allow-shm", help="Let any user of this machine register shared memory.")
    ] = False,
) -> None:
    """Serve a model repository until Ctrl-C.

    When every model answers, the ports are printed as one JSON line on stdout; the log goes to stderr.
    Stub processes that die or hang are replaced, and so is the server.
    """
    from nereid.server import serve as server

    ports = Ports(http_port, grpc_port, metrics_port)
    options = ServerOptions(
        repository.resolve(),
        profile,
        host,
        ports,
        model_control_mode,
        allow_shm=allow_shm,
        flags=tuple(flags or ()),
    )
    with _meant():
        server.check_options(options)
    try:
        server.serve(options, os.environ, health_port, drain_s)
    except ServerError as error:
        fail(str(error), FAILED)


@app.command()
def classify(
    images: Annotated[
        list[Path] | None, typer.Argument(help="Image files, or folders.", metavar="IMAGE|DIR…")
    ] = None,
    url: Annotated[str, typer.Option(help="HOST:PORT; default: the repository's running server.")] = "",
    protocol: Annotated[Protocol, typer.Option(help="How to talk to the server.")] = "grpc",
    shm: Annotated[
        bool, typer.Option("--shm", help="Hand images over by shared memory; see `nereid serve --allow-shm`.")
    ] = False,
    model: Annotated[str, typer.Option(help="Model to ask.")] = "classify",
    top: Annotated[int, typer.Option(help="How many classes to show.", min=1)] = 5,
    concurrency: Annotated[int, typer.Option(help="Requests in flight at once.", min=1)] = 8,
    watch: Annotated[
        Path | None,
        typer.Option(help="Then classify what appears in this folder, until Ctrl-C.", metavar="DIR"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array of all answers.")] = False,
    as_jsonl: Annotated[bool, typer.Option("--jsonl", help="One JSON object per line and image.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="One row per image, with its best class.")] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Classify images on a running server; a bad one is reported and the rest goes on."""
    from nereid.cli import classify as client
    from nereid.client.classifier import Classifier
    from nereid.client.request import DEFAULT_PORTS
    from nereid.server import run_dir

    if as_json + as_jsonl + as_csv > 1:
        fail("--json, --jsonl and --csv exclude each other", WRONG_USAGE)
    form: client.Format = "json" if as_json else "jsonl" if as_jsonl else "csv" if as_csv else "table"
    if not images and not watch:
        fail("nothing to classify: give IMAGE|DIR, or --watch DIR", WRONG_USAGE)
    if watch and as_json:
        fail("--watch never ends a JSON array; take --jsonl", WRONG_USAGE)
    if watch and not watch.is_dir():
        fail(f"{watch} is no folder", WRONG_USAGE)
    with reporting():
        # Before the first list is made, which takes its time: nothing that comes meanwhile is missed.
        arrivals = client.arrivals_in(watch) if watch else None
    with _meant():
        paths = client.collect(images or [])
    if not url:
        running = run_dir.find(run_dir.root(os.environ), repository)
        url = running.url(protocol) if running else f"127.0.0.1:{DEFAULT_PORTS[protocol]}"
    try:
        classifier = Classifier(
            url, protocol, model, concurrency=concurrency, shared_memory="system" if shm else None
        )
    except ValueError as error:
        fail(f"--{error}", WRONG_USAGE)
    failed = 0
    with classifier, reporting(), client.printing(form) as write:
        if paths:
            failed = client.classify(classifier, paths, top, write)
        if watch and arrivals:
            client.watch(classifier, watch, arrivals, top, write)
    if failed:
        fail(f"{failed} of {len(paths)} images could not be classified", FAILED)


@app.command()
def gateway(
    context: typer.Context,
    url: Annotated[
        str, typer.Option(help="HOST:PORT of Triton's gRPC; default: the repository's running server.")
    ] = "",
    model: Annotated[str, typer.Option(help="Model to ask.")] = "classify",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port; 0 for any free one.")] = 8080,
    keys_file: keys.KeysFile = None,
    require_keys: Annotated[
        bool, typer.Option("--require-keys", help="Need a key on loopback, too, as behind a proxy.")
    ] = False,
    rate: Annotated[
        float | None, typer.Option(help="Images per second of a key that has no rate.", min=0.001)
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Name that requests may have as their Host. May be repeated.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call. May be repeated.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="Serve HTTPS with this certificate (PEM).")] = None,
    certificate_key: Annotated[Path | None, typer.Option(help="The certificate's key (PEM).")] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="Log each request on stderr, as JSON behind the time.")
    ] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Serve a REST API and a web page in front of a running server, until Ctrl-C.

    When it listens, its port is printed as one JSON line on stdout. On loopback everybody may classify;
    beyond, everybody needs a key, and a route's weights are changed with one only.
    """
    from nereid.cli import gateway as server
    from nereid.cli.gateway_route import RepositoryRoute
    from nereid.client.request import DEFAULT_PORTS
    from nereid.gateway.settings import Settings

    with reporting():
        running = None if url else find_server(context, repository)
        with _meant():
            settings = Settings(
                url=url or (running.url("grpc") if running else f"127.0.0.1:{DEFAULT_PORTS['grpc']}"),
                model=model,
                host=host,
                keys_needed=require_keys,
                rate_per_s=rate,
                allowed_hosts=tuple(allowed_host or ()),
                cors_origins=tuple(cors_origin or ()),
            )
        server.serve(
            settings,
            server.Listen(host, port, certificate, certificate_key),
            keys.ring(keys_file, context.obj),
            None if url else RepositoryRoute(repository, model, lambda: find_server(context, repository)),
            access_log,
        )


@app.command()
def doctor() -> None:
    """Check this machine for what the embedded server needs; each failure names what mends it."""
    from nereid.server import doctor as examination

    findings = list(examination.examine(os.environ))
    table = Table("", "what", "found", "fix")
    for finding in findings:
        table.add_row(finding.verdict, finding.what, finding.found, finding.fix)
    Console().print(table)
    failed = [finding.what for finding in findings if finding.verdict == "fail"]
    if failed:
        fail(f"not ready to serve: {', '.join(failed)}", FAILED)


@app.command()
def check(
    repository: Annotated[
        Path,
        typer.Argument(help="Model repository.", envvar="NEREID_REPOSITORY", show_default="this checkout's"),
    ] = REPOSITORY,
    as_json: Annotated[bool, typer.Option("--json", help="All that was looked at, as JSON.")] = False,
) -> None:
    """Check a model repository without a server: configs, networks, ensembles, labels, routes, checksums.

    Shown are failures, which a server would refuse or answer wrong, and notes; every profile is looked at.
    """
    import json
    from dataclasses import asdict

    from nereid.repository import check as examination

    if not repository.is_dir():
        fail(f"'{repository}' is no folder", WRONG_USAGE)
    with reporting():
        findings = examination.check(repository)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = Table("", "model", "what", "found", "fix")
        for each in findings:
            if each.verdict != "ok":
                table.add_row(*map(escape, (each.verdict, each.model, each.what, each.found, each.fix)))
        if table.rows:
            Console().print(table)
        print(examination.count(repository, findings))
    failures = [finding for finding in findings if finding.verdict == "fail"]
    if failures:
        first = f"{failures[0].model}, {failures[0].what}: {failures[0].found}"
        fail(f"{len(failures)} failure{'s' if failures[1:] else ''}, the first: {first}", FAILED)


@app.command()
def tune(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A network, its preprocessing, or a fused model of both.")],
    objective: Annotated[
        Objective, typer.Option(help="Images/s at saturation, or the median of a caller that is alone.")
    ] = "throughput",
    p99_ms: Annotated[
        float | None, typer.Option(help="What the p99 may be at most.", min=0.001, show_default="any")
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="How long it may take, in all.", min=0.2, callback=_finite)
    ] = 5.0,
    profile: Annotated[str, typer.Option(help="The profile to start from.")] = DEFAULT_PROFILE,
    concurrency: Annotated[
        str | None, typer.Option(help="Callers at once; a list takes commas.", show_default="1,8,32")
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(help="Images, or folders, to ask with.", show_default="the sample photo, 640x427"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the settings that are drawn.", min=0)] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, but write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All that was measured, as JSON.")] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Find the best settings of a model for this machine, and write them as the profile `tuned`.

    Candidates are served and loaded in turn, by a server of its own on a copy of the repository. Only what
    beats the present settings by more than the noise of the measurement is written.
    """
    from nereid.cli import tune as command
    from nereid.tune import tuning
    from nereid.server import serve as server

    with reporting():
        with _meant():
            server.check_options(ServerOptions(repository, profile))
            callers = tuning.concurrencies(concurrency) or tuning.CONCURRENCIES
        tune_options = tuning.TuneOptions(
            repository,
            model,
            profile,
            objective,
            p99_ms,
            minutes,
            callers,
            images or (),
            seed,
            dry_run,
        )
        command.tune(tune_options, context.obj, as_json)


@contextlib.contextmanager
def _meant() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        fail(str(error), WRONG_USAGE)


@app.callback()
def hand_on_environment(context: typer.Context) -> None:
    """Image recognition on a real NVIDIA Triton Inference Server."""
    context.obj = os.environ


@route_commands.app.callback()
def route() -> None:
    """Look at a route and change it: what a change breaks is refused, and one command goes back."""


@keys.app.callback()
def key() -> None:
    """Say who may use a gateway: make keys, list them, take them back."""


def main() -> None:
    """Run the command line."""
    app(prog_name="nereid")


if __name__ == "__main__":
    main()

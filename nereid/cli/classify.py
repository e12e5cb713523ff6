"""`nereid classify`: classify image files on a running server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nereid.assets import REPOSITORY
from nereid.cli.options import (
    DEFAULT_MODEL,
    DEFAULT_MODEL_HELP,
    Repository,
    complete_model,
    find_classifier,
    invalid_values,
)
from nereid.cli.server_options import find_server
from nereid.errors import OperationFailed, WrongUsage

if TYPE_CHECKING:
    from nereid.cli.predictions import Format

# As `nereid.client.request.ProtocolName`; importing the client would slow down the start of every command.
Protocol = Literal["grpc", "http"]


def classify(
    context: typer.Context,
    images: Annotated[
        list[Path] | None, typer.Argument(help="Image files, or folders with images.", metavar="IMAGE|DIR…")
    ] = None,
    url: Annotated[
        str,
        typer.Option(help="HOST:PORT of the server.", show_default="the running server of the repository"),
    ] = "",
    protocol: Annotated[Protocol, typer.Option(help="Protocol of the requests.")] = "grpc",
    api_key: Annotated[
        str,
        typer.Option(
            help="Key for a guarded server. Other users of this machine can read a command line, so "
            "prefer the variable.",
            envvar="NEREID_KEY",
            show_envvar=True,
            show_default="none",
        ),
    ] = "",
    shm: Annotated[
        bool,
        typer.Option(
            "--shm", help="Send images through shared memory; the server needs `nereid serve --allow-shm`."
        ),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            help="Model that classifies: a route or a pinned model.",
            autocompletion=complete_model,
            show_default=DEFAULT_MODEL_HELP,
        ),
    ] = "",
    top: Annotated[int, typer.Option(help="Number of classes to print per image.", min=1)] = 5,
    concurrency: Annotated[
        int, typer.Option(help="Maximum number of requests in flight at the same time.", min=1)
    ] = 8,
    watch: Annotated[
        Path | None,
        typer.Option(help="Then classify each new image in this folder, until Ctrl-C.", metavar="DIR"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array of all responses.")] = False,
    as_jsonl: Annotated[bool, typer.Option("--jsonl", help="Print one line of JSON per image.")] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print one row per image, with its best class.")
    ] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Classify images on a running server.

    An image that fails is reported on stderr, and the others continue. The exit code is then 1.
    """
    from nereid.cli import predictions
    from nereid.client.classifier import Classifier
    from nereid.client.request import DEFAULT_PORTS

    output_format = _output_format(as_json, as_jsonl, as_csv)
    if not images and not watch:
        raise WrongUsage("nothing to classify: expected IMAGE or DIR, or --watch DIR")
    if watch and as_json:
        raise WrongUsage("--watch never ends a JSON array; fix: --jsonl")
    if watch and not watch.is_dir():
        raise WrongUsage(f"--watch: '{watch}' is not a folder")
    # Listed before the first image is sent, so that no image is missed that arrives meanwhile.
    arrivals = predictions.arrivals_in(watch) if watch else None
    with invalid_values():
        paths = predictions.collect(images or [])
    if url:
        model = model or DEFAULT_MODEL
    else:
        model = find_classifier(repository, model)
        running = find_server(context, repository)
        url = running.url(protocol) if running else f"127.0.0.1:{DEFAULT_PORTS[protocol]}"
    try:
        classifier = Classifier(
            url,
            protocol,
            model,
            concurrency=concurrency,
            shared_memory="system" if shm else None,
            api_key=api_key,
        )
    except ValueError as error:
        raise WrongUsage(f"--{error}") from None
    failed = 0
    with classifier, predictions.printing(output_format) as write:
        if paths:
            failed = predictions.classify_all(classifier, paths, top, write)
        if watch and arrivals:
            predictions.watch_folder(classifier, watch, arrivals, top, write)
    if failed:
        raise OperationFailed(f"{failed} of {len(paths)} images could not be classified")


def _output_format(as_json: bool, as_jsonl: bool, as_csv: bool) -> "Format":
    if as_json + as_jsonl + as_csv > 1:
        raise WrongUsage("--json, --jsonl and --csv exclude each other; fix: choose one")
    return "json" if as_json else "jsonl" if as_jsonl else "csv" if as_csv else "table"

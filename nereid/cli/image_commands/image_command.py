"""The options and the steps that all commands for images share."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from nereid.application.chosen_models import find_model
from nereid.base.assets import TaskModels
from nereid.base.errors import OperationFailed, WrongUsage, invalid_values
from nereid.cli.options import complete_model
from nereid.cli.server_options import find_server

if TYPE_CHECKING:
    from nereid.cli.image_commands.outcomes import Format
    from nereid.cli.image_commands.views import View

# As `nereid.client.request.ProtocolName`; importing the client would slow down the start of every command.
Protocol = Literal["grpc", "http"]

Images: TypeAlias = Annotated[
    list[Path] | None, typer.Argument(help="Image files, or folders with images.", metavar="IMAGE|DIR…")
]
Url: TypeAlias = Annotated[
    str, typer.Option(help="HOST:PORT of the server.", show_default="the running server of the repository")
]
WithProtocol: TypeAlias = Annotated[Protocol, typer.Option(help="Protocol of the requests.")]
ApiKey: TypeAlias = Annotated[
    str,
    typer.Option(
        help="Key for a guarded server. Other users of this machine can read a command line, so "
        "prefer the variable.",
        envvar="NEREID_KEY",
        show_envvar=True,
        show_default="none",
    ),
]
SharedMemory: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--shm",
        help="Send images through shared memory; the server needs `nereid serve --allow-shm`. If the server "
        "refuses, images are sent in requests.",
    ),
]
Concurrency: TypeAlias = Annotated[
    int, typer.Option(help="Maximum number of requests in flight at the same time.", min=1)
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON array of all responses.")]
JsonLines: TypeAlias = Annotated[bool, typer.Option("--jsonl", help="Print one line of JSON per image.")]
Draw: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="Draw boxes and texts on a copy of each image: a folder, or a file for one image.",
        metavar="OUT",
    ),
]


def model_option(action: str, default_help: str) -> Any:
    """Return the option for the model of a command."""
    return typer.Option(
        help=f"Model that {action}: a route or a pinned model.",
        autocompletion=complete_model,
        show_default=default_help,
    )


def watch_option(action: str) -> Any:
    """Return the option for a folder that is watched."""
    return typer.Option(help=f"Then {action} each new image in this folder, until Ctrl-C.", metavar="DIR")


@dataclass(frozen=True, slots=True)
class ImageTask:
    """One task as a command.

    Attributes:
        action, present, past: the verb: `classify`, `classifying`, `classified`.
        models: the models of the task.
        load: returns the class of the client, and the view of its results; imports them.
    """

    action: str
    present: str
    past: str
    models: TaskModels
    load: "Callable[[], tuple[Any, View]]"


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of one call of a command, as typed."""

    images: list[Path]
    url: str
    protocol: Protocol
    api_key: str
    shm: bool
    model: str
    concurrency: int
    watch: Path | None
    output_format: "Format"
    repository: Path
    draw: Path | None = None


def run(context: typer.Context, task: ImageTask, wanted: Wanted, **options: Any) -> None:
    """Send images to a server and print the outcomes; `options` are those of each request.

    Raises:
        WrongUsage: options exclude each other, or a model does not exist.
        OperationFailed: images failed.
    """
    from nereid.cli.image_commands import outcomes
    from nereid.cli.image_commands.drawing import Drawings
    from nereid.cli.image_files import collect

    _check(task, wanted)
    watch = wanted.watch
    # Listed before the first image is sent, so that no image is missed that arrives meanwhile.
    arrivals = outcomes.arrivals_in(watch) if watch else None
    with invalid_values():
        paths = collect(wanted.images)
    drawings = Drawings(wanted.draw, 0 if watch else len(paths)) if wanted.draw else None
    client_class, view = task.load()
    client = _connect(context, client_class, task, wanted)
    failed = 0
    with client, outcomes.printing(wanted.output_format, view) as write:
        each = outcomes.Outcomes(lambda images: client.infer_many(images, **options), write, view, drawings)
        if paths:
            failed = each.all_of(paths, task.present)
        if watch and arrivals:
            each.watched(watch, arrivals)
    if failed:
        raise OperationFailed(f"{failed} of {len(paths)} images could not be {task.past}")


def _check(task: ImageTask, wanted: Wanted) -> None:
    if not wanted.images and not wanted.watch:
        raise WrongUsage(f"nothing to {task.action}: expected IMAGE or DIR, or --watch DIR")
    if wanted.watch and wanted.output_format == "json":
        raise WrongUsage("--watch never ends a JSON array; fix: --jsonl")
    if wanted.watch and not wanted.watch.is_dir():
        raise WrongUsage(f"--watch: '{wanted.watch}' is not a folder")


def _connect(context: typer.Context, client_class: Any, task: ImageTask, wanted: Wanted) -> Any:
    """Return the client of the named server, or of the running server of the repository."""
    from nereid.client.request import DEFAULT_PORTS

    url, protocol = wanted.url, wanted.protocol
    model = wanted.model or task.models.default
    if not url:
        model = find_model(wanted.repository, wanted.model, task.models)
        running = find_server(context, wanted.repository)
        url = running.url(protocol) if running else f"127.0.0.1:{DEFAULT_PORTS[protocol]}"
    try:
        return client_class(
            url,
            protocol,
            model,
            concurrency=wanted.concurrency,
            shared_memory="system" if wanted.shm else None,
            api_key=wanted.api_key,
        )
    except ValueError as error:
        raise WrongUsage(f"--{error}") from None


def output_format(as_json: bool, as_jsonl: bool, as_csv: bool) -> "Format":
    """Return the format that the options choose.

    Raises:
        WrongUsage: more than one option.
    """
    if as_json + as_jsonl + as_csv > 1:
        raise WrongUsage("--json, --jsonl and --csv exclude each other; fix: choose one")
    return "json" if as_json else "jsonl" if as_jsonl else "csv" if as_csv else "table"

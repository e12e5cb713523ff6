"""The commands that send images to a running server: one for each task, built from its record."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nereid.application.chosen_models import find_model
from nereid.base import files
from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed, ServingError, WrongUsage, value_errors_as_wrong_usage
from nereid.base.task import CommandTexts, Task
from nereid.base.task_registry import TASKS
from nereid.cli.options import DEFAULT_REPOSITORY, SUFFIXES, collect, complete_model
from nereid.cli.server_options import find_server

if TYPE_CHECKING:
    from nereid.cli.image_commands.outcomes import Format
    from nereid.cli.image_commands.view import View

FAILURES = "An image that fails is reported on stderr, and the others continue. The exit code is then 1."
PDF = ".pdf"
# As `nereid.client.request.ProtocolName`; importing the client would slow down the start of every command.
Protocol = Literal["grpc", "http"]


def image_command(task: Task, texts: CommandTexts) -> Callable[..., None]:
    """Return the command of a task, for Typer."""

    def command(context: typer.Context, **values: Any) -> None:
        numbers = {number.argument: values.pop(number.name) for number in texts.numbers}
        run(context, task, ImageCommandOptions(**values), numbers)

    declared = {"context": (typer.Context, inspect.Parameter.empty)} | _options(task, texts)
    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for name, (kind, default) in declared.items()
    ]
    command.__name__ = task.name
    command.__doc__ = f"{texts.help}\n\n{FAILURES} {texts.note}"
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {name: kind for name, (kind, _) in declared.items()}
    return command


def _options(task: Task, texts: CommandTexts) -> dict[str, tuple[Any, Any]]:
    """Return the annotations and default values of a command's options, by their names."""
    task_models = f"the models of task `{task.name}` in this checkout or package"
    of_task = {
        "model": typer.Option(
            help=f"Model that {task.verb_phrase}: a route or a pinned model.",
            autocompletion=complete_model,
            show_default=f"`{task.model}`, or the only model that {task.verb_phrase}",
        ),
        "watch": typer.Option(
            help=f"Then {task.name} each new image in this folder, until Ctrl-C.", metavar="DIR"
        ),
        "as_csv": typer.Option("--csv", help=texts.csv),
        "repository": typer.Option(
            help="Model repository.",
            envvar="NEREID_REPOSITORY",
            show_default=DEFAULT_REPOSITORY if task.default_repository == REPOSITORY else task_models,
        ),
    }
    options: dict[str, tuple[Any, Any]] = {}
    for field in fields(ImageCommandOptions):
        if field.name == "concurrency":
            options |= {
                number.name: (Annotated[int, typer.Option(help=number.help, min=1)], number.default)
                for number in texts.numbers
            }
        kind = Annotated[field.type, of_task[field.name]] if field.name in of_task else field.type
        options[field.name] = kind, field.default
    options["repository"] = options["repository"][0], task.default_repository
    absent = {"draw": not texts.draws, "pdf": not texts.writes_pdf}
    return {name: option for name, option in options.items() if not absent.get(name)}


@dataclass(frozen=True, slots=True)
class ImageCommandOptions:
    """The options of one call of a command, in the order of its help; `_options` adds texts of its task."""

    images: Annotated[
        list[Path] | None, typer.Argument(help="Image files, or folders with images.", metavar="IMAGE|DIR…")
    ] = None
    url: Annotated[
        str,
        typer.Option(help="HOST:PORT of the server.", show_default="the running server of the repository"),
    ] = ""
    protocol: Annotated[Protocol, typer.Option(help="Protocol of the requests.")] = "grpc"
    api_key: Annotated[
        str,
        typer.Option(
            help="Key for a guarded server. Other users of this machine can read a command line, so "
            "prefer the variable.",
            envvar="NEREID_KEY",
            show_envvar=True,
            show_default="none",
        ),
    ] = ""
    shm: Annotated[
        bool,
        typer.Option(
            "--shm",
            help="Send images through shared memory; the server needs `nereid serve --allow-shm`. If the "
            "server refuses, images are sent in requests.",
        ),
    ] = False
    model: str = ""
    concurrency: Annotated[
        int, typer.Option(help="Maximum number of requests in flight at the same time.", min=1)
    ] = 8
    watch: Path | None = None
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array of all responses.")] = False
    as_jsonl: Annotated[bool, typer.Option("--jsonl", help="Print one line of JSON per image.")] = False
    as_csv: bool = False
    draw: Annotated[
        Path | None,
        typer.Option(
            help="Draw boxes and text on a copy of each image: a folder, or a file for one image.",
            metavar="OUT",
        ),
    ] = None
    pdf: Annotated[
        Path | None,
        typer.Option(
            help="Save each file as a PDF whose text can be searched: a folder, or a file for one image.",
            metavar="OUT",
        ),
    ] = None
    repository: Path = REPOSITORY

    def output_format(self, task: Task) -> "Format":
        """Check the options, and return the format that they choose.

        Raises:
            WrongUsage: options are missing, or exclude each other.
        """
        formats: dict[Format, bool] = {"json": self.as_json, "jsonl": self.as_jsonl, "csv": self.as_csv}
        chosen = [name for name, is_chosen in formats.items() if is_chosen]
        if chosen[1:]:
            raise WrongUsage("--json, --jsonl and --csv exclude each other; fix: choose one")
        if not self.images and not self.watch:
            raise WrongUsage(f"nothing to {task.name}: expected IMAGE or DIR, or --watch DIR")
        if self.watch and self.as_json:
            raise WrongUsage("--json cannot be combined with --watch; fix: --jsonl")
        if self.watch and not self.watch.is_dir():
            raise WrongUsage(f"--watch: '{self.watch}' is not a folder")
        return chosen[0] if chosen else "table"


def run(
    context: typer.Context, task: Task, options: ImageCommandOptions, request_options: Mapping[str, int]
) -> None:
    """Send images to a server and print the outcomes; `request_options` apply to each request.

    Raises:
        WrongUsage: options exclude each other, or a model does not exist.
        OperationFailed: images failed.
    """
    from nereid.cli.image_commands import outcomes

    output_format = options.output_format(task)
    watch, more = options.watch, task.command.suffixes if task.command else ()
    # Listed before the first image is sent, so that no image that arrives meanwhile is missed.
    arrivals = outcomes.arrivals_in(watch, more) if watch else None
    with value_errors_as_wrong_usage():
        paths = collect(options.images or [], more)
    view = task.entry_point("view")
    savers = _savers(options, view, 0 if watch else len(paths))
    client = _connect(context, task, options)
    failed = 0
    with client, outcomes.printing(output_format, view) as write:
        printed = outcomes.Outcomes(
            lambda images: client.infer_many(images, **request_options), write, savers
        )
        if paths:
            failed = printed.all_of(paths, task.present_participle)
        if watch and arrivals:
            printed.watched(watch, arrivals)
    if failed:
        raise OperationFailed(f"{failed} of {len(paths)} images could not be {task.past_participle}")


def _savers(options: ImageCommandOptions, view: "View", images: int) -> list[Callable[[Path, Any], None]]:
    """Return the functions that write the files for `--draw` and `--pdf`.

    Raises:
        WrongUsage: a target is a file, but there may be several images.
    """
    from nereid.cli.image_commands.drawing import OutputFiles, draw

    savers: list[Callable[[Path, Any], None]] = []
    if options.draw:
        drawings = OutputFiles("--draw", options.draw, (".png", *SUFFIXES), images)

        def save_drawing(image: Path, result: Any) -> None:
            if image.suffix.lower() != PDF:  # a PDF cannot be drawn on
                draw(image, view.marks(result), drawings.path_of(image))

        savers.append(save_drawing)
    if options.pdf and (searchable := view.searchable):
        if options.watch and options.pdf.resolve().is_relative_to(options.watch.resolve()):
            raise WrongUsage(f"--pdf: '{options.pdf}' is inside the folder that --watch reads")
        documents = OutputFiles("--pdf", options.pdf, (PDF,), images)

        def save_document(image: Path, result: Any) -> None:
            path = documents.path_of(image)
            if path.exists() and path.samefile(image):
                raise OSError("cannot be saved as a PDF: --pdf names the same file")
            try:
                files.replace(path, searchable(image.read_bytes(), result))
            except ServingError as error:
                raise OSError(f"cannot be saved as a PDF: {error}") from None

        savers.append(save_document)
    return savers


def _connect(context: typer.Context, task: Task, options: ImageCommandOptions) -> Any:
    """Return the client of the named server, or of the running server of the repository."""
    from nereid.client.request import DEFAULT_PORTS

    url, protocol, model = options.url, options.protocol, options.model or task.model
    if not url:
        model = find_model(options.repository, options.model, task)
        running = find_server(context, options.repository)
        url = running.url(protocol) if running else f"127.0.0.1:{DEFAULT_PORTS[protocol]}"
    with value_errors_as_wrong_usage("--"):
        return task.entry_point("client")(
            url,
            protocol,
            model,
            concurrency=options.concurrency,
            shared_memory="system" if options.shm else None,
            api_key=options.api_key,
        )


IMAGE_COMMANDS = [image_command(task, task.command) for task in TASKS if task.command and not task.extends]

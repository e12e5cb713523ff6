"""`nereid read`: read the text of image files on a running server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nereid.base.assets import READERS, TEXT_REPOSITORY
from nereid.cli.image_commands.image_command import (
    ApiKey,
    Concurrency,
    Draw,
    Images,
    ImageTask,
    Json,
    JsonLines,
    SharedMemory,
    Url,
    Wanted,
    WithProtocol,
    model_option,
    output_format,
    run,
    watch_option,
)
from nereid.cli.options import DEFAULT_READER_HELP, TextRepository

if TYPE_CHECKING:
    from nereid.cli.image_commands.views import View


def read(
    context: typer.Context,
    images: Images = None,
    url: Url = "",
    protocol: WithProtocol = "grpc",
    api_key: ApiKey = "",
    shm: SharedMemory = False,
    model: Annotated[str, model_option("reads text", DEFAULT_READER_HELP)] = "",
    concurrency: Concurrency = 8,
    watch: Annotated[Path | None, watch_option("read")] = None,
    as_json: Json = False,
    as_jsonl: JsonLines = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print one row per line of text, and per field.")
    ] = False,
    draw: Draw = None,
    repository: TextRepository = TEXT_REPOSITORY,
) -> None:
    """Read the text of images on a running server; a model for documents prints its fields, too.

    An image that fails is reported on stderr, and the others continue. The exit code is then 1.
    An image without text is not a failure.
    """
    form = output_format(as_json, as_jsonl, as_csv)
    wanted = Wanted(
        images or [],
        url,
        protocol,
        api_key,
        shm,
        model,
        concurrency,
        watch,
        form,
        repository,
        draw,
    )
    run(context, TASK, wanted)


def _load() -> "tuple[Any, View]":
    from nereid.cli.image_commands.views import TEXTS
    from nereid.tasks.read.client import Reader

    return Reader, TEXTS


TASK = ImageTask("read", "reading", "read", READERS, _load)

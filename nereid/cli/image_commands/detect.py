"""`nereid detect`: find the objects in image files on a running server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nereid.base.assets import DETECTORS, REPOSITORY
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
from nereid.cli.options import DEFAULT_DETECTOR_HELP, Repository

if TYPE_CHECKING:
    from nereid.cli.image_commands.views import View


def detect(
    context: typer.Context,
    images: Images = None,
    url: Url = "",
    protocol: WithProtocol = "grpc",
    api_key: ApiKey = "",
    shm: SharedMemory = False,
    model: Annotated[str, model_option("finds objects", DEFAULT_DETECTOR_HELP)] = "",
    concurrency: Concurrency = 8,
    watch: Annotated[Path | None, watch_option("detect")] = None,
    as_json: Json = False,
    as_jsonl: JsonLines = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print one row per object.")] = False,
    draw: Draw = None,
    repository: Repository = REPOSITORY,
) -> None:
    """Find the objects in images on a running server.

    An image that fails is reported on stderr, and the others continue. The exit code is then 1.
    An image without objects is not a failure.
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
    from nereid.cli.image_commands.views import OBJECTS
    from nereid.tasks.detect.client import Detector

    return Detector, OBJECTS


TASK = ImageTask("detect", "searching", "searched", DETECTORS, _load)

"""`nereid classify`: classify image files on a running server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nereid.base.assets import CLASSIFIERS, REPOSITORY
from nereid.cli.image_commands.image_command import (
    ApiKey,
    Concurrency,
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
from nereid.cli.options import DEFAULT_MODEL_HELP, Repository

if TYPE_CHECKING:
    from nereid.cli.image_commands.views import View


def classify(
    context: typer.Context,
    images: Images = None,
    url: Url = "",
    protocol: WithProtocol = "grpc",
    api_key: ApiKey = "",
    shm: SharedMemory = False,
    model: Annotated[str, model_option("classifies", DEFAULT_MODEL_HELP)] = "",
    top: Annotated[int, typer.Option(help="Number of classes to print per image.", min=1)] = 5,
    concurrency: Concurrency = 8,
    watch: Annotated[Path | None, watch_option("classify")] = None,
    as_json: Json = False,
    as_jsonl: JsonLines = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print one row per image, with its best class.")
    ] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Classify images on a running server.

    An image that fails is reported on stderr, and the others continue. The exit code is then 1.
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
    )
    run(context, TASK, wanted, top_k=top)


def _load() -> "tuple[Any, View]":
    from nereid.cli.image_commands.views import CLASSES
    from nereid.tasks.classify.client import Classifier

    return Classifier, CLASSES


TASK = ImageTask("classify", "classifying", "classified", CLASSIFIERS, _load)

"""`nereid watch`: publish every network that appears in a folder."""

from pathlib import Path
from typing import Annotated

import typer

from nereid.application.chosen_models import own_repository
from nereid.base.assets import REPOSITORY
from nereid.cli.models.publish import AcceptChange, MaxMemory, MaxSlowdown, Share, Tolerance
from nereid.cli.options import Repository, complete_model, show_progress
from nereid.cli.server_options import find_server


def watch(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(help="Folder to watch; it must not be inside the repository.", metavar="DIR")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Model that all files belong to.",
            show_default="from the file name",
            autocompletion=complete_model,
        ),
    ] = "",
    settle_s: Annotated[
        float, typer.Option(help="Seconds without a change after which a file counts as complete.", min=0.1)
    ] = 2.0,
    poll: Annotated[
        bool,
        typer.Option(
            "--poll", help="Poll the folder instead of using file system events, for network drives."
        ),
    ] = False,
    share: Share = 0,
    accept_change: AcceptChange = False,
    tolerance: Tolerance = 0.05,
    max_slowdown: MaxSlowdown = 1.5,
    max_memory: MaxMemory = 1.5,
    repository: Repository = REPOSITORY,
) -> None:
    """Publish every complete ONNX file, or folder with one, that appears in DIR, until Ctrl-C.

    `classify.onnx`, or `classify@monday.onnx`, becomes the next version of `classify`. Published files move
    to DIR/published. Rejected files move to DIR/rejected, with the reason. Links inside DIR
    stay in place.
    """
    from nereid.models.publish import watch as watching
    from nereid.models.publish.examination import Gates

    watching.check(folder, repository, model, share)
    gates = Gates(
        tolerance=tolerance,
        is_change_accepted=accept_change,
        max_slowdown=max_slowdown,
        max_memory_ratio=max_memory,
    )
    publishing = watching.publication(
        repository, lambda: find_server(context, own_repository(repository)), gates, share, show_progress
    )
    terms = f"{model} {tolerance} {accept_change} {max_slowdown} {max_memory}"
    staging = watching.staging_for(folder, repository)
    watching.watch(folder, staging, publishing, settle_s=settle_s, model=model, terms=terms, is_polling=poll)

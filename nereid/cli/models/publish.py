"""`nereid publish`, `watch`, `rollback`, `retire`, `versions`, `remove` and `reload`: a model's versions."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nereid.application.chosen_models import changeable_repository
from nereid.base.assets import REPOSITORY
from nereid.base.errors import WrongUsage, no_server, value_errors_as_wrong_usage
from nereid.base.units import format_bytes, parse_share
from nereid.cli.options import AsJson, Model, Repository, collect, complete_model, network_file, show_progress
from nereid.cli.server_options import find_server
from nereid.cli.tables import print_table

if TYPE_CHECKING:
    from nereid.models.publish.network import VersionState


def _share(value: str | float) -> float:
    """Parse a share of the traffic, such as `10%` or `0.1`; the default is already a number."""
    try:
        return parse_share(str(value))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Share = Annotated[
    float,
    typer.Option(
        help="Initial traffic share, such as `10%`; 0 serves only requests that name the version.",
        parser=_share,
        metavar="SHARE",
    ),
]
AcceptChange = Annotated[
    bool,
    typer.Option("--accept-change", help="Publish even if the outputs differ from the current version's."),
]
Tolerance = Annotated[
    float,
    typer.Option(
        help="Maximum difference from the current version: for scores, relative to the largest score; "
        "for text, the fraction of characters that differ; for embeddings, (1 - cosine) / 2.",
        min=0,
    ),
]
MaxSlowdown = Annotated[
    float, typer.Option(help="Maximum time per image, as a multiple of the current version's.", min=0)
]
MaxMemory = Annotated[
    float, typer.Option(help="Maximum memory, as a multiple of the current version's.", min=0)
]


def publish(
    context: typer.Context,
    model: Model,
    source: Annotated[Path, network_file("NEW.onnx|DIR")],
    share: Share = 0,
    accept_change: AcceptChange = False,
    tolerance: Tolerance = 0.05,
    max_slowdown: MaxSlowdown = 1.5,
    max_memory: MaxMemory = 1.5,
    against: Annotated[
        int, typer.Option(help="Version to compare with.", show_default="the default variant's", min=0)
    ] = 0,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image file, or folder with images, to compare on. May be repeated.",
            show_default="the task's sample images",
        ),
    ] = None,
    precision: Annotated[
        Literal["fp16"] | None,
        typer.Option(
            help="Convert an FP32 network first; inputs and outputs stay FP32. FP16 is for GPUs with "
            "tensor cores; it is slower on a CPU.",
            show_default="no conversion",
        ),
    ] = None,
    repository: Repository = REPOSITORY,
) -> None:
    """Publish a new version of a model without interrupting the server.

    The network is examined in a separate process first. A rejected network never reaches the server.
    """
    from nereid.models.publish import publisher
    from nereid.models.publish.examination import ExaminationLimits

    with value_errors_as_wrong_usage():
        paths = tuple(collect(images or ()))
    limits = ExaminationLimits(
        images=paths,
        tolerance=tolerance,
        is_change_accepted=accept_change,
        max_slowdown=max_slowdown,
        max_memory_ratio=max_memory,
        against=against,
    )
    server_info = find_server(context, changeable_repository(repository))
    done = publisher.publish(repository, model, source, server_info, limits, share, show_progress, precision)
    print(done.line(server_info))


def rollback(context: typer.Context, model: Model, repository: Repository = REPOSITORY) -> None:
    """Move all traffic away from a model's newest version immediately; the version stays loaded."""
    from nereid.models.publish import publisher

    for line in publisher.rollback(
        repository, model, find_server(context, changeable_repository(repository))
    ):
        print(line)


def retire(
    context: typer.Context,
    model: Model,
    version: Annotated[int, typer.Argument(help="Version number.", metavar="VERSION", min=1)],
    repository: Repository = REPOSITORY,
) -> None:
    """Retire a version that gets no traffic: unload it once it is idle, then delete it."""
    from nereid.models.publish import publisher

    publisher.retire(
        repository, model, version, find_server(context, changeable_repository(repository)), show_progress
    )
    print(f"{model} {version}: retired")


def watch(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(help="Folder to watch; it must not be inside the repository.", metavar="DIR")
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Model to which every file is published.",
            show_default="from the file name",
            autocompletion=complete_model,
        ),
    ] = "",
    settle_s: Annotated[
        float, typer.Option(help="Seconds a file must stay unchanged before it counts as complete.", min=0.1)
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
    """Publish each complete ONNX file, or folder containing one, that appears in DIR, until Ctrl-C.

    `classify.onnx`, or `classify@monday.onnx`, becomes the next version of `classify`. Published files move
    to DIR/published. Rejected files move to DIR/rejected, with the reason. Links inside DIR
    stay in place.
    """
    from nereid.models.publish import watch as watching
    from nereid.models.publish.examination import ExaminationLimits

    watching.check(folder, repository, model, share)
    limits = ExaminationLimits(
        tolerance=tolerance,
        is_change_accepted=accept_change,
        max_slowdown=max_slowdown,
        max_memory_ratio=max_memory,
    )
    publishing = watching.publication(
        repository,
        lambda: find_server(context, changeable_repository(repository)),
        limits,
        share,
        show_progress,
    )
    terms = f"{model} {tolerance} {accept_change} {max_slowdown} {max_memory}"
    watching.watch(
        folder, repository, publishing, settle_s=settle_s, model=model, terms=terms, is_polling=poll
    )


COLUMNS = ("version", "state", "traffic", "pinned as", "size", "SHA-256", "published", "from", "changes")


def remove(
    context: typer.Context,
    model: Model,
    yes: Annotated[bool, typer.Option("--yes", help="Remove the models without asking.")] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Remove a model from the server and the repository; for a route, also the models behind it."""
    from nereid.models.publish import remove as removal

    server_info = find_server(context, changeable_repository(repository))
    names = removal.find_parts(repository, model).models or (model,)
    if not yes:
        if not sys.stdin.isatty():
            raise WrongUsage("cannot ask without a terminal", f"--yes to remove {', '.join(names)}")
        if not typer.confirm(f"Remove {', '.join(names)} with all versions?"):
            print("nothing has changed", file=sys.stderr)
            return
    for name in removal.remove(repository, model, server_info, show_progress):
        print(f"{name}: removed")


def reload(context: typer.Context, model: Model, repository: Repository = REPOSITORY) -> None:
    """Reload a model after you edit its config or files, without interrupting its requests."""
    from nereid.models.publish import remove as removal

    server_info = find_server(context, changeable_repository(repository))
    if server_info is None:
        raise no_server(repository)
    removal.reload(repository, model, server_info)
    print(f"{model}: reloaded")


def versions(
    context: typer.Context, model: Model, as_json: AsJson = False, repository: Repository = REPOSITORY
) -> None:
    """List a model's versions: state, share of the traffic, size, and time and source of the publication."""
    from nereid.models.publish.network import versions as listed

    name, states = listed(repository, model, find_server(context, repository))
    if as_json:
        print(json.dumps({"model": name, "versions": [asdict(state) for state in states]}))
    else:
        _print(states)


def _print(versions: "Sequence[VersionState]") -> None:
    from nereid.models.routes.location import percent

    print_table(
        *COLUMNS,
        rows=[
            (
                str(version.version),
                version.state,
                "\n".join(f"{route} {percent(share)}" for route, share in version.shares.items()),
                ", ".join(version.pinned),
                format_bytes(version.size_bytes),
                version.sha256[:12],
                version.published,
                version.source,
                "\n".join(version.changes),
            )
            for version in versions
        ],
    )

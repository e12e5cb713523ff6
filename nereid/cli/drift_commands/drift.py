"""`nereid drift`: references of routes, and the comparison of their traffic with them."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nereid.application.chosen_models import own_repository
from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed, WrongUsage, invalid_values
from nereid.base.units import parse_duration
from nereid.cli.options import AsJson, Repository, complete_model, environment, show_help, show_progress
from nereid.cli.server_options import find_server, with_server

if TYPE_CHECKING:
    from nereid.backends.routing.reference_file import Reference
    from nereid.insight.drift.recording import History

app = typer.Typer()

Route = Annotated[
    str,
    typer.Argument(
        help="Name of the route.",
        metavar="ROUTE",
        show_default="the only route of the repository",
        autocompletion=complete_model,
    ),
]


@app.callback(invoke_without_command=True)
def drift(context: typer.Context) -> None:
    """Compare the images and responses of a route with a reference."""
    show_help(context)


@app.command()
@with_server
def baseline(
    context: typer.Context,
    route: Route = "",
    images: Annotated[
        Path | None, typer.Option(help="Folder with at least 100 typical images.", metavar="DIR")
    ] = None,
    from_traffic: Annotated[
        str,
        typer.Option(
            help="Duration of recorded traffic, such as `30m` or `1h`; at most 6 hours.", metavar="DURATION"
        ),
    ] = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Store the reference of a route: from images that every variant classifies, or from recorded traffic.

    A running server is needed. Images that cannot be classified are named and left out.
    """
    from nereid.insight.drift.baseline import store
    from nereid.insight.drift.comparison import targets_of
    from nereid.models.routes.target import find_route

    if bool(images) == bool(from_traffic):
        raise WrongUsage("expected one of --images DIR and --from-traffic DURATION")
    location = find_route(own_repository(repository), route)
    record = find_server(context, repository)
    if record is None:
        raise OperationFailed(f"no server of '{repository}' runs; fix: nereid serve")
    targets = targets_of(location, record.profile)
    if images:
        from nereid.cli.image_files import collect
        from nereid.insight.drift.baseline import from_images

        with invalid_values():
            paths = collect([images])
        made = from_images(record.url("http"), repository, location.name, targets, paths, show_progress)
    else:
        from nereid.backends.routing.reference_file import path_of, read_reference
        from nereid.insight.drift.baseline import from_traffic as of_traffic

        seconds, history = _seconds(from_traffic), _history(context, repository)
        old = read_reference(path_of(repository, location.name))
        made = of_traffic(history, location.name, targets, seconds, time.time(), old, show_progress)
    path = store(repository, location.name, made)
    print(f"{location.name}: reference stored in {path}: {_sizes(made)}")


@app.command()
@with_server
def show(
    context: typer.Context, route: Route = "", as_json: AsJson = False, repository: Repository = REPOSITORY
) -> None:
    """Show for each variant which signals of the last hour differ from the reference.

    The drift monitor of `nereid serve` computes the table once a minute.
    """
    import msgspec

    from nereid.cli.drift_commands import drift_view as view
    from nereid.insight.drift.drift_report import report
    from nereid.models.routes.target import find_route
    from nereid.server import run_dir

    location = find_route(repository, route)
    base = run_dir.root(environment(context))
    folder = run_dir.find_folder(base, repository)
    if folder is None:
        raise OperationFailed(f"no server of '{repository}' runs; fix: nereid serve")
    found = report(folder, location.name, run_dir.find_gateways(base, repository))
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        view.show(found)


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise WrongUsage(f"--from-traffic: {error}") from None


def _history(context: typer.Context, repository: Path) -> "History":
    from nereid.insight.drift.recording import History
    from nereid.server import run_dir

    folder = run_dir.find_folder(run_dir.root(environment(context)), repository)
    if folder is None:
        raise OperationFailed("--from-traffic needs a server that `nereid serve` started on this machine")
    return History.load(folder)


def _sizes(reference: "Reference") -> str:
    return ", ".join(f"{each.name} {each.images:,} images" for each in reference.variants)

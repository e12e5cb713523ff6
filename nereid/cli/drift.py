"""`nereid drift`: store a route's reference, and compare its traffic with it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from nereid.application.chosen_models import changeable_repository
from nereid.base import files
from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed, WrongUsage, no_server, value_errors_as_wrong_usage
from nereid.base.units import format_duration, parse_duration
from nereid.cli.options import AsJson, Repository, collect, complete_model, environment, show_progress
from nereid.cli.server_options import find_server, with_server
from nereid.cli.tables import print_table
from nereid.server import run_dir

if TYPE_CHECKING:
    from nereid.insight.drift.comparison import SignalDrift, VariantDrift
    from nereid.insight.drift.drift_report import DriftReport
app = typer.Typer(help="Compare the images and responses of a route with a reference.")
NO_VALUE = "—"

Route = Annotated[
    str,
    typer.Argument(
        help="Name of the route.",
        metavar="ROUTE",
        show_default="the only route of the repository",
        autocompletion=complete_model,
    ),
]


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
    """Store a route's reference, from images that every variant classifies or from recorded traffic.

    This needs a running server. Images that cannot be classified are reported and skipped.
    """
    from nereid.backends.routing.reference_file import format_reference, path_of, read_reference
    from nereid.insight.drift import baseline as references
    from nereid.insight.drift.comparison import targets_of
    from nereid.insight.drift.recording import History
    from nereid.models.routes.location import find_route

    if bool(images) == bool(from_traffic):
        raise WrongUsage("expected one of --images DIR and --from-traffic DURATION")
    location = find_route(changeable_repository(repository), route)
    server_info = find_server(context, repository)
    if server_info is None:
        raise no_server(repository)
    targets, path = targets_of(location, server_info.profile), path_of(repository, location.name)
    if images:
        with value_errors_as_wrong_usage():
            paths = collect([images])
        url = server_info.url("http")
        made = references.from_images(url, repository, location.name, targets, paths, show_progress)
    else:
        with value_errors_as_wrong_usage("--from-traffic: "):
            seconds = parse_duration(from_traffic)
        folder = run_dir.find_folder(run_dir.root(environment(context)), repository)
        if folder is None:
            raise OperationFailed("--from-traffic needs a server that `nereid serve` started on this machine")
        old = read_reference(path)
        made = references.from_traffic(
            History.load(folder), targets, seconds, time.time(), old, show_progress
        )
    files.replace(path, format_reference(made))
    sizes = ", ".join(f"{variant.name} {variant.images:,} images" for variant in made.variants)
    print(f"{location.name}: reference stored in {path}: {sizes}")


@app.command()
@with_server
def show(
    context: typer.Context, route: Route = "", as_json: AsJson = False, repository: Repository = REPOSITORY
) -> None:
    """Show which signals of each variant differed from the reference in the last hour.

    The drift monitor of `nereid serve` updates the table once a minute.
    """
    from nereid.insight.drift.drift_report import report
    from nereid.models.routes.location import find_route

    location = find_route(repository, route)
    run_root = run_dir.root(environment(context))
    folder = run_dir.find_folder(run_root, repository)
    if folder is None:
        raise no_server(repository)
    drifted = report(folder, location.name, run_dir.find_gateways(run_root, repository))
    if as_json:
        print(msgspec.json.encode(drifted).decode())
    else:
        print_report(drifted)


def print_report(report: "DriftReport") -> None:
    """Print a report for a person."""
    route = report.route
    if route.problem:
        print(f"{route.route}: {route.problem}")
    for variant in route.variants:
        print(_heading(variant))
        if variant.signals:
            print_table(
                *("signal", "verdict", "PSI", "limit", "JS", "limit", "images"),
                rows=[_row(signal) for signal in variant.signals],
            )
    print(
        f"last {format_duration(report.window_s)}, of which {format_duration(report.covered_s)} are recorded"
    )
    if report.agreement:
        rows = [
            (
                shadow.shadow,
                format_duration(shadow.age_s),
                f"{shadow.requests:,}",
                f"{shadow.agreed / shadow.requests:.1%}",
            )
            for shadow in report.agreement
        ]
        print_table("shadow", "ended before", "requests", "agreed", rows=rows)
    if report.accuracy:
        rows = [
            (
                feedback.variant,
                f"{feedback.answers:,}",
                f"{feedback.correct / feedback.answers:.1%}",
                f"{feedback.low:.1%} to {feedback.high:.1%}",
            )
            for feedback in report.accuracy
        ]
        print_table("variant", "feedback", "correct", "95 % interval", rows=rows)


def _heading(variant: "VariantDrift") -> str:
    name = f"{variant.variant} (version {variant.version} of {variant.model})"
    if variant.problem:
        return f"{name}: not compared: {variant.problem}"
    age = format_duration(variant.reference_age_s or 0)
    verdict = "drift" if variant.has_drifted else "no drift"
    return f"{name}: {verdict}; {variant.requests:,} images in the window, reference {age} old"


def _row(signal: "SignalDrift") -> tuple[str, ...]:
    numbers = [
        f"{values[measure]:.3f}" if measure in values else NO_VALUE
        for measure in ("psi", "js")
        for values in (signal.score, signal.limit)
    ]
    return signal.signal, signal.verdict, *numbers, f"{signal.images:,}"

"""`nereid tune`: find the best settings of a model for this machine."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nereid.application.chosen_models import changeable_repository
from nereid.base.assets import REPOSITORY
from nereid.base.errors import OperationFailed, value_errors_as_wrong_usage
from nereid.cli.options import (
    Repository,
    collect,
    complete_model,
    complete_profile,
    environment,
    show_progress,
)
from nereid.cli.tables import console
from nereid.server.command_line import DEFAULT_PROFILE, TUNED_PROFILE, ServerOptions, check_options

if TYPE_CHECKING:
    from nereid.insight.tune.tuning import TuneOptions, TuneReport

HEADINGS = ("", "settings", "concurrency", "images/s", "p50 ms", "p99 ms")
Objective = Literal["throughput", "latency"]


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {value}")
    return value


def tune(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A network, its preprocessing, or a fused model of both.",
            metavar="MODEL",
            autocompletion=complete_model,
        ),
    ],
    objective: Annotated[
        Objective,
        typer.Option(help="Maximise images/s under load, or minimise the median latency of a single client."),
    ] = "throughput",
    p99_ms: Annotated[
        float | None,
        typer.Option(help="Maximum acceptable p99 latency, in milliseconds.", min=0.001, show_default="any"),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(help="Maximum duration of the whole search, in minutes.", min=0.2, callback=_finite),
    ] = 5.0,
    profile: Annotated[
        str, typer.Option(help="Profile to start the search from.", autocompletion=complete_profile)
    ] = DEFAULT_PROFILE,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Requests in flight at the same time; separate values with commas.", show_default="1,8,32"
        ),
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image file, or folder with images, to send. May be repeated.",
            show_default="the sample photo, 640x427; for a reader a parcel label",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for the settings to try.", min=0)] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, but write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all measurements as JSON.")] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Find the best settings of a model for this machine, and write them as the profile `tuned`.

    The search uses its own server on a copy of the repository. It writes a setting only if the gain over the
    current settings exceeds the measurement noise.
    """
    from nereid.insight.tune import search, tuning

    with value_errors_as_wrong_usage():
        check_options(ServerOptions(repository, profile))
        values = tuning.CONCURRENCIES if concurrency is None else tuning.concurrencies(concurrency)
    options = tuning.TuneOptions(
        repository if dry_run else changeable_repository(repository),
        model,
        profile,
        search.Objective(objective, math.inf if p99_ms is None else p99_ms),
        minutes,
        values,
        images or (),
        seed,
        dry_run,
    )
    run_tuning(options, environment(context), as_json)


def run_tuning(options: "TuneOptions", environment: Mapping[str, str], as_json: bool) -> None:
    """Search, print the result, and write the profile if the gain exceeds the noise.

    Raises:
        WrongUsage: the model cannot be tuned, or an image does not exist.
        OperationFailed: the model cannot be served, no setting meets the p99 limit, or a package is missing.
    """
    from nereid.base.processes import exit_on_sigterm
    from nereid.insight.tune import profiles, tuning

    tuning.check_packages()
    tuned = profiles.tunable(options.repository, options.model, options.profile)
    if not options.is_dry:
        profiles.check_writable(options.repository, tuned)
    with value_errors_as_wrong_usage():
        images = [path.read_bytes() for path in collect(options.images)]
    for note in tuned.notes:
        show_progress(f"note: {note}")
    with exit_on_sigterm():
        report = tuning.run_search(options, tuned, images, environment, show_progress)
    written: list[str] = []
    if not as_json:
        _show(report, console())
    try:
        if report.verdict == "better" and not options.is_dry:
            written = tuning.write(options, tuned, report, show_progress)
        if report.verdict == "infeasible":
            raise OperationFailed(report.reason())
    finally:  # the measurements are printed even if they cannot be written
        if as_json:
            print(json.dumps(report.document() | {"written": written}, indent=2))
        elif report.verdict != "infeasible":
            print(report.reason())
    if not as_json:
        print(_outcome(written))


def _show(report: "TuneReport", console: Console) -> None:
    table = Table(*HEADINGS)
    for mark, settings, concurrency, load in report.points():
        numbers = (f"{number:.1f}" for number in (load.rate, load.p50_ms, load.p99_ms))
        table.add_row(mark, escape(settings), str(concurrency), *numbers)
    console.print(table)


def _outcome(written: Sequence[str]) -> str:
    if not written:
        return "nothing was written"
    models = ", ".join(written)
    return f"profile '{TUNED_PROFILE}' written for {models}: nereid serve --profile {TUNED_PROFILE}"

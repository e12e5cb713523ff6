"""`nereid tune`: find the best settings of a model for this machine."""

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from nereid.application.chosen_models import own_repository
from nereid.base.assets import REPOSITORY
from nereid.base.errors import invalid_values
from nereid.cli.options import Repository, complete_model, complete_profile, environment
from nereid.server.command_line import DEFAULT_PROFILE, ServerOptions, check_options

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
        typer.Option(help="Maximum p99 latency in ms of an accepted setting.", min=0.001, show_default="any"),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(help="Maximum duration of the whole search, in minutes.", min=0.2, callback=_finite),
    ] = 5.0,
    profile: Annotated[
        str, typer.Option(help="Profile that the search starts from.", autocompletion=complete_profile)
    ] = DEFAULT_PROFILE,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Requests in flight at the same time; several values with commas.", show_default="1,8,32"
        ),
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image file, or folder with images, to send. May be repeated.",
            show_default="the sample photo, 640x427; for a reader a parcel label",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed for the settings that are tried.", min=0)] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, but write nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all measurements as JSON.")] = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Find the best settings of a model for this machine, and write them as the profile `tuned`.

    The search uses its own server on a copy of the repository. It writes a setting only if the gain over
    the present settings exceeds the noise of the measurement.
    """
    from nereid.cli.models import tuning_run
    from nereid.insight.tune import tuning

    with invalid_values():
        check_options(ServerOptions(repository, profile))
        values = tuning.concurrencies(concurrency) or tuning.CONCURRENCIES
    options = tuning.TuneOptions(
        repository if dry_run else own_repository(repository),
        model,
        profile,
        objective,
        p99_ms,
        minutes,
        values,
        images or (),
        seed,
        dry_run,
    )
    tuning_run.run(options, environment(context), as_json)

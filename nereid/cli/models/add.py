"""`nereid add`: add a network of one's own under a new name."""

from pathlib import Path
from typing import Annotated

import typer

from nereid.assets import REPOSITORY
from nereid.cli.models.publish import served
from nereid.cli.options import Repository, complete_preset, find_server, own_repository, show_progress
from nereid.units import format_ms


def add(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            help="ONNX file, or a folder with the file and its external data.", metavar="MODEL.onnx|DIR"
        ),
    ],
    name: Annotated[str, typer.Option(help="Public name of the new model.")],
    preset: Annotated[
        str,
        typer.Option(
            help="Preprocessing that the network was trained with, see docs/preprocess.md.",
            autocompletion=complete_preset,
        ),
    ],
    labels: Annotated[
        Path | None,
        typer.Option(help="Text file with one class name per line.", show_default="no class names"),
    ] = None,
    softmax: Annotated[
        bool, typer.Option("--softmax", help="Append a softmax, for a network whose output is logits.")
    ] = False,
    size: Annotated[
        int,
        typer.Option(
            help="Height and width of the input in pixels, for a network that accepts any size.",
            show_default="that of the network",
            min=0,
        ),
    ] = 0,
    output: Annotated[
        str,
        typer.Option(
            help="Output with the scores, for a network with several outputs.", show_default="the only output"
        ),
    ] = "",
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="Hardware to write configs for: `cpu` or `gpu`. May be repeated.", show_default="both"
        ),
    ] = None,
    repository: Repository = REPOSITORY,
) -> None:
    """Add an ONNX classifier under a new name: write its configs, check them, load it if a server runs."""
    from nereid.publish import add as adding

    profiles = tuple(profile or adding.PROFILES)
    wish = adding.AddRequest(source, name, preset, labels, softmax, size, output, profiles)
    record = find_server(context, own_repository(repository))
    done = adding.add(repository, wish, record, show_progress)
    print(f"{name}: {served(record)}, {format_ms(done.report.latency_ms)} per image, {done.seconds:.1f} s")

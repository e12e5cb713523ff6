"""`nereid add`: add your own network under a new name."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nereid.application.chosen_models import changeable_repository
from nereid.base.assets import REPOSITORY
from nereid.base.errors import WrongUsage
from nereid.base.task_registry import TASKS
from nereid.base.units import format_bytes, format_ms
from nereid.cli.options import AsJson, Repository, complete_preset, network_file, show_progress
from nereid.cli.server_options import find_server

if TYPE_CHECKING:
    from nereid.models.publish.add import AddProposal

# The tasks whose networks can be added.
ADDED = [task for task in TASKS if task.network]
# The settings of a proposal that describe its network.
NETWORK_SETTINGS = ("image", "outputs", "is_channels_last", "is_grey", "classes", "head")
LAYOUTS = {False: "NCHW", True: "NHWC"}


def _parameters(arguments: Sequence[str], preset: str) -> dict[str, str]:
    """Return the parameters of the preprocessing as a config spells them; later arguments win.

    Raises:
        WrongUsage: an argument is neither NAME=VALUE nor a JSON file with an object.
    """
    parameters = {"preset": preset} if preset else {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name.isidentifier():
            parameters[name] = value
        else:
            parameters |= _from_file(Path(argument))
    return parameters


def _size(word: str) -> tuple[int, int]:
    """Return height and width in pixels: `640` for both, or `480x640`; zeros if empty.

    Raises:
        WrongUsage: the text is neither.
    """
    if not word:
        return 0, 0
    height, times, width = word.lower().partition("x")
    try:
        size = int(height), int(width if times else height)
    except ValueError:
        size = 0, 0
    if min(size) < 1:
        raise WrongUsage(f"--size: expected pixels such as 640, or height and width as 480x640, got '{word}'")
    return size


def _from_file(path: Path) -> dict[str, str]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WrongUsage(
            f"--preprocess '{path}': expected NAME=VALUE or a JSON file ({error.strerror})"
        ) from None
    except ValueError as error:
        raise WrongUsage(f"--preprocess '{path}': expected a JSON file, got: {error}") from None
    if not isinstance(document, dict):
        raise WrongUsage(
            f"--preprocess '{path}': expected an object of parameters, got {type(document).__name__}"
        )
    return {str(name): _text(value) for name, value in document.items()}


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def add(
    context: typer.Context,
    source: Annotated[Path, network_file("MODEL.onnx|DIR")],
    name: Annotated[str, typer.Option(help="Public name of the new model.")],
    preset: Annotated[
        str,
        typer.Option(
            help="Preprocessing that the network was trained with, such as `imagenet`.",
            autocompletion=complete_preset,
            show_default="from the file's metadata",
        ),
    ] = "",
    preprocess: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE|FILE.json",
            help="Preprocessing parameter, such as `mean=127.5,127.5,127.5`, or a JSON file with several. "
            "May be repeated.",
            show_default="the preset's",
        ),
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            help="Text file with one class name per line; for a text recogniser, one character per line.",
            show_default="from the file's metadata",
        ),
    ] = None,
    activation: Annotated[
        str,
        typer.Option(
            help="Function to append to the scores: `softmax`, `sigmoid`, `none`, or `auto` to decide "
            "after a test run.",
        ),
    ] = "auto",
    size: Annotated[
        str,
        typer.Option(
            help="Input height and width in pixels, for a network that accepts any size: `640` or `480x640`.",
            show_default="from the network or its metadata",
            metavar="PIXELS",
        ),
    ] = "",
    task: Annotated[
        str,
        typer.Option(
            help=f"Kind of the outputs: {', '.join(f'`{task.name}` for {task.network}' for task in ADDED)}.",
            show_default="detected from the file",
        ),
    ] = "",
    head: Annotated[
        str,
        typer.Option(
            help="Layout of a detector's outputs, such as `yolov8`.",
            show_default="detected from names and shapes",
        ),
    ] = "",
    score_threshold: Annotated[
        float | None,
        typer.Option(help="Minimum score of a detected object.", min=0, max=1, show_default="0.25"),
    ] = None,
    iou_threshold: Annotated[
        float | None,
        typer.Option(
            help="Maximum overlap (intersection over union) of two objects of the same class.",
            min=0,
            max=1,
            show_default="0.45",
        ),
    ] = None,
    output: Annotated[
        str,
        typer.Option(
            help="Output with the scores or the embedding, for a network with several outputs.",
            show_default="the only output",
        ),
    ] = "",
    images: Annotated[
        list[Path] | None,
        typer.Option(
            help="Photo to show results for. May be repeated.",
            show_default="the task's sample images",
        ),
    ] = None,
    preview: Annotated[
        Path | None,
        typer.Option(help="PNG file to write: the photos as the network sees them.", metavar="FILE.png"),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="Hardware to write configs for: `cpu` or `gpu`. May be repeated.", show_default="both"
        ),
    ] = None,
    instances: Annotated[
        int | None,
        typer.Option(
            help="Number of instances on a CPU; 1 saves memory.", min=1, show_default="based on CPU cores"
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace all versions of existing models with this name.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Add the model without asking.")] = False,
    as_json: AsJson = False,
    repository: Repository = REPOSITORY,
) -> None:
    """Add an ONNX network under a new name: inspect it, show a summary, and serve it after you confirm."""
    from nereid.models.publish import add as adding
    from nereid.models.publish.add import PROFILES, AddRequest
    from nereid.models.publish.publisher import describe_served

    if activation not in (known := ("auto", "none", "softmax", "sigmoid")):
        raise WrongUsage(f"invalid activation: expected one of {', '.join(known)}, got '{activation}'")
    if not (yes or as_json or sys.stdin.isatty()):
        raise WrongUsage(
            "cannot ask without a terminal", "--yes to add the model, or --json to see the summary"
        )
    request = AddRequest(
        source,
        name,
        _parameters(preprocess or [], preset),
        labels=labels,
        activation=activation,  # type: ignore[arg-type]
        size=_size(size),
        output=output,
        profiles=tuple(profile or PROFILES),
        instances=instances,
        images=tuple(images or ()),
        is_replacing=replace,
        preview=preview,
        task=task,
        head=head,
        post_processing={
            name: f"{number:g}"
            for name, number in (("score_threshold", score_threshold), ("iou_threshold", iou_threshold))
            if number is not None
        },
    )
    server_info, units = find_server(context, changeable_repository(repository)), list[str]()

    def confirm(proposal: "AddProposal") -> bool:
        units.append(proposal.importer.unit)
        if as_json:
            print(json.dumps(_document(name, proposal)))
        else:
            print("\n".join(summary_lines(name, proposal)), file=sys.stderr)
        return yes or (not as_json and typer.confirm("Add it?", err=True))

    try:
        done = adding.add(repository, request, server_info, show_progress, confirm)
    except adding.Declined as error:
        print(f"{error}; nothing has changed", file=sys.stderr)
        return
    latency = format_ms(done.report.latency_ms)
    line = f"{name}: {describe_served(server_info)}, {latency} per {units[0]}, {done.seconds:.1f} s"
    print(line, file=sys.stderr if as_json else sys.stdout)


def summary_lines(name: str, proposal: "AddProposal") -> list[str]:
    """Return a one-screen summary of the model that a network will become."""
    settings, measurements = proposal.settings, proposal.measurements
    (height, width), span, importer = settings.sides_px, proposal.value_range, proposal.importer
    unit = importer.unit
    # A reader gives its recogniser BGR.
    colours = settings.parameters.get("color_order", "RGB" if settings.parameters else "BGR")
    rows = [
        ("input", f"{height} x {_pixels(width)}, {settings.image.datatype.removeprefix('TYPE_')}, "
                  f"layout {LAYOUTS[settings.is_channels_last]}, colours {colours}"),
        *([("preprocessing", ", ".join(f"{key} {text}" for key, text in settings.parameters.items())
            + (f" (from {proposal.parameters_from})" if proposal.parameters_from else ""))]
          if settings.parameters else []),
        *([("values", f"{span[0]:.3g} to {span[1]:.3g} for the photos below")] if span else []),
        *proposal.about,
        *([("labels", f"{len(proposal.labels)} {importer.labels_are} from {proposal.labels_from}"
            if proposal.labels else "none; fix: --labels FILE shows names instead of numbers")]
          if importer.labels_are else []),
        ("batches", f"several {unit}s at a time" if settings.can_batch else f"one {unit} at a time"),
        *(("change", change) for change in proposal.changes),
        ("cost", f"{format_ms(measurements.latency_ms)} per {unit} on one core, "
                 f"{proposal.processes} processes, "
                 f"about {format_bytes(proposal.memory_bytes)} with profile cpu"),
        *((image, importer.shown(result)) for image, result in proposal.results.items()),
        *(("uses", f"model '{model}', which is already in the repository") for model in proposal.shared),
    ]  # fmt: skip
    width_of_first = max(len(first) for first, _ in rows)
    return [f"{name}:", *(f"  {first:<{width_of_first}}  {second}" for first, second in rows)]


def _pixels(width: int) -> str:
    return f"{width} pixels" if width > 0 else "any number of pixels"


def _document(name: str, proposal: "AddProposal") -> dict[str, Any]:
    from nereid.models.publish.importing.model_importer import importers

    importer = proposal.importer
    fields = {key: value for key, value in asdict(proposal).items() if key != "importer"}
    settings, outcomes = fields.pop("settings"), fields.pop("results")
    form = {key: settings[key] for key in NETWORK_SETTINGS}
    results = {kind.results: {} for kind in importers().values()} | {importer.results: outcomes}
    labels = {"count": len(proposal.labels), "from": proposal.labels_from}
    importer_fields = {"task": importer.name, "unit": importer.unit, "form": form}
    importer_fields |= {"parameters": settings["parameters"], "can_batch": settings["can_batch"]}
    return {"name": name, **importer_fields, **fields, "labels": labels, **results}

"""The commands that change the set of models; the command table hands them the environment."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nereid.assets import REPOSITORY
from nereid.cli.options import Repository, find_server, reporting
from nereid.errors import WrongUsage

if TYPE_CHECKING:
    from nereid.server.run_dir import ServerRecord

Model = Annotated[str, typer.Argument(help="A network, or a route or pinned model in front of it.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Weight = Annotated[float, typer.Option(help="What its variant gets at once; 0: only who asks for it.", min=0)]
AcceptChange = Annotated[
    bool, typer.Option("--accept-change", help="Other answers than the current version's are meant.")
]
Tolerance = Annotated[
    float, typer.Option(help="How far answers may differ, as a share of the largest.", min=0)
]
MaxSlowdown = Annotated[
    float, typer.Option(help="How many times the current version's time it may take.", min=0)
]
MaxMemory = Annotated[float, typer.Option(help="How many times its memory it may take.", min=0)]


def add(
    context: typer.Context,
    source: Annotated[
        Path, typer.Argument(help="An ONNX file, or a folder with it and its data.", metavar="MODEL.onnx|DIR")
    ],
    name: Annotated[str, typer.Option(help="Its public name.")],
    preset: Annotated[str, typer.Option(help="How images are prepared for it, see docs/preprocess.md.")],
    labels: Annotated[Path | None, typer.Option(help="A file with one class a line.")] = None,
    softmax: Annotated[bool, typer.Option("--softmax", help="Append one: the network gives logits.")] = False,
    size: Annotated[int, typer.Option(help="Side of the input, if the network takes any.", min=0)] = 0,
    output: Annotated[str, typer.Option(help="The output with the scores, if there are several.")] = "",
    profile: Annotated[
        list[str] | None,
        typer.Option(help="Hardware to write configs for, `cpu` or `gpu`.", show_default="both"),
    ] = None,
    repository: Repository = REPOSITORY,
) -> None:
    """Give an ONNX file a public name: write its models, check them, and load them if a server runs."""
    with reporting():
        from nereid.publish import add as adding

        profiles = tuple(profile or adding.PROFILES)
        wish = adding.Wish(source, name, preset, labels, softmax, size, output, profiles)
        record = find_server(context, repository)
        done = adding.add(repository, wish, record, _tell)
        print(f"{name}: {_served(record)}, {done.report.latency_ms:.1f} ms per image, {done.seconds:.1f} s")


def publish(
    context: typer.Context,
    model: Model,
    source: Annotated[
        Path, typer.Argument(help="An ONNX file, or a folder with it and its data.", metavar="NEW.onnx|DIR")
    ],
    weight: Weight = 0,
    accept_change: AcceptChange = False,
    tolerance: Tolerance = 0.05,
    max_slowdown: MaxSlowdown = 1.5,
    max_memory: MaxMemory = 1.5,
    against: Annotated[
        int, typer.Option(help="The current version.", show_default="that of the default variant", min=0)
    ] = 0,
    images: Annotated[
        list[Path] | None,
        typer.Option(help="Images, or folders, to compare it by.", show_default="the two sample photos"),
    ] = None,
    repository: Repository = REPOSITORY,
) -> None:
    """Publish a new version of a model while the server goes on answering.

    It is examined in a process of its own first: what is rejected never reaches the server.
    """
    with reporting():
        from nereid.cli.classify import collect
        from nereid.publish import publisher

        gates = publisher.Gates(
            tolerance=tolerance,
            is_change_accepted=accept_change,
            most_slowdown=max_slowdown,
            most_memory=max_memory,
            against=against,
        )
        if images:
            try:
                gates = replace(gates, images=tuple(collect(images)))
            except ValueError as error:
                raise WrongUsage(str(error)) from None
        record = find_server(context, repository)
        done = publisher.publish(repository, model, source, record, gates, weight, _tell)
        behind = f" as {', '.join(done.pinned)}" if done.pinned else ""
        print(f"{done.model} {done.version}: {_served(record)}{behind}, after {done.seconds:.1f} s")


def rollback(context: typer.Context, model: Model, repository: Repository = REPOSITORY) -> None:
    """Take all traffic from a model's newest version, at once; it stays loaded."""
    with reporting():
        from nereid.publish import publisher

        for line in publisher.rollback(repository, model, find_server(context, repository)):
            print(line)


def retire(
    context: typer.Context,
    model: Model,
    version: Annotated[int, typer.Argument(help="The version.", min=1)],
    repository: Repository = REPOSITORY,
) -> None:
    """Take a version away that gets no traffic: unload it once it is idle, and delete it."""
    with reporting():
        from nereid.publish import publisher

        publisher.retire(repository, model, version, find_server(context, repository), _tell)
        print(f"{model} {version}: retired")


def versions(
    context: typer.Context, model: Model, as_json: AsJson = False, repository: Repository = REPOSITORY
) -> None:
    """List a model's versions: state, size, SHA-256, when they were published, their share of the traffic."""
    with reporting():
        from nereid.cli import versions_view as view
        from nereid.publish.versions import versions as listed

        name, found = listed(repository, model, find_server(context, repository))
        if as_json:
            print(json.dumps({"model": name, "versions": [asdict(each) for each in found]}))
        else:
            view.print_versions(found)


def watch(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(help="The folder; it must not be in the repository.", metavar="DIR")
    ],
    model: Annotated[
        str, typer.Option(help="What all that appears is for.", show_default="what its name says")
    ] = "",
    settle_s: Annotated[
        float, typer.Option(help="Seconds for which a file must not change, to be complete.", min=0.1)
    ] = 2.0,
    poll: Annotated[
        bool, typer.Option("--poll", help="Ask the filesystem for changes rather than be told.")
    ] = False,
    weight: Weight = 0,
    accept_change: AcceptChange = False,
    tolerance: Tolerance = 0.05,
    max_slowdown: MaxSlowdown = 1.5,
    max_memory: MaxMemory = 1.5,
    repository: Repository = REPOSITORY,
) -> None:
    """Publish every complete ONNX file, or folder with one, that appears in DIR, until Ctrl-C.

    `classify.onnx`, or `classify@monday.onnx`, becomes the next version of `classify`. What was published
    moves to DIR/published, what was rejected to DIR/rejected, with its reason; links stay.
    """
    with reporting():
        from nereid.publish import watch as watching
        from nereid.publish.publisher import Gates

        watching.check(folder, repository, model)
        gates = Gates(
            tolerance=tolerance,
            is_change_accepted=accept_change,
            most_slowdown=max_slowdown,
            most_memory=max_memory,
        )
        publishing = watching.publication(
            repository, lambda: find_server(context, repository), gates, weight, _tell
        )
        terms = f"{model} {tolerance} {accept_change} {max_slowdown} {max_memory}"
        watching.watch(folder, publishing, settle_s=settle_s, model=model, terms=terms, is_polling=poll)


def _served(record: "ServerRecord | None") -> str:
    return "served" if record else "in the repository, no server runs"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

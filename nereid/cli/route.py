"""The commands of `nereid route`; the command table hands them the environment as `context.obj`."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nereid.assets import REPOSITORY
from nereid.cli.options import Repository, find_server, reporting
from nereid.errors import WrongUsage

if TYPE_CHECKING:  # the commands import what they need, so that others start without it
    from nereid.routes.change import Propose
    from nereid.routes.served import RunningServer

app = typer.Typer(no_args_is_help=True)

RouteName = Annotated[
    str, typer.Option("--route", help="Name of the route.", show_default="the repository's only one")
]
Weights = Annotated[
    list[str] | None,
    typer.Argument(help="New weights of variants that the route has.", metavar="NAME=WEIGHT…"),
]
NewFile = Annotated[str, typer.Option("--file", help="A whole new route; `-` reads stdin.", metavar="FILE|-")]
Offline = Annotated[bool, typer.Option("--offline", help="Write without asking a server.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]


@app.command()
def show(
    context: typer.Context,
    as_json: AsJson = False,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Show a route as its file has it, and whether the running server serves that."""
    with reporting():
        from nereid.cli import route_view as view
        from nereid.routes import target as routes

        target = routes.find_route(repository, route)
        view.show(target, routes.look(target), _server(context, repository), as_json)


@app.command("set")
def set_route(
    context: typer.Context,
    weights: Weights = None,
    file: NewFile = "",
    offline: Offline = False,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Give variants new weights, or replace the whole route, and wait until the server serves it.

    What it names must be ready on the running server. Its generation becomes the next number.
    """
    with reporting():
        propose = _proposal(weights or [], file)
        if propose is None:
            raise WrongUsage("nothing to set; give NAME=WEIGHT…, or a whole route with --file")
        _change(context, propose, offline, route, repository)


@app.command()
def diff(
    weights: Weights = None,
    file: NewFile = "",
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Show what `nereid route set` would change, and how many sticky keys would move; write nothing.

    Without arguments: the difference to the newest entry of the history that is another route.
    """
    with reporting():
        from nereid.cli import route_view as view
        from nereid.routes import change, diff
        from nereid.routes import target as routes

        target = routes.find_route(repository, route)
        if propose := _proposal(weights or [], file):
            planned = change.plan(target, propose)
            old, new = planned.present.route(), planned.route
        elif before := change.previous(present := routes.look(target)):
            old, new = before, present.route()
        else:
            print("the history has no other route")
            return
        view.print_diff(diff.differences(old, new), diff.describe_moves(diff.moves(old, new)))


@app.command()
def explain(
    key: Annotated[str, typer.Option(help="The caller's sticky identity, `x-route-key`.")] = "",
    header: Annotated[list[str] | None, typer.Option(help="A header it has.", metavar="NAME=VALUE")] = None,
    variant: Annotated[str, typer.Option(help="The variant it asks for, `x-variant`.")] = "",
    version: Annotated[str, typer.Option(help="The network's version it asks for, `x-model-version`.")] = "",
    as_json: AsJson = False,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Tell which variant a request gets, and why, while every variant is healthy."""
    with reporting():
        from nereid.cli import route_view as view
        from nereid.routes import explain
        from nereid.routes import target as routes
        from nereid.routing.assignment import FORCE_VARIANT, FORCE_VERSION, ROUTE_KEY

        asked = {FORCE_VARIANT: variant, FORCE_VERSION: version, ROUTE_KEY: key}
        parameters = _headers(header or []) | {name: value for name, value in asked.items() if value}
        target = routes.find_route(repository, route)
        present = routes.look(target)
        present.route()
        table = routes.check(target, present.text or b"")
        view.print_explanation(explain.explain(table, parameters), as_json)


@app.command()
def history(as_json: AsJson = False, route: RouteName = "", repository: Repository = REPOSITORY) -> None:
    """List what the route has been, newest first."""
    with reporting():
        from nereid.cli import route_view as view
        from nereid.routes import target as routes

        view.print_history(routes.look(routes.find_route(repository, route)).all_entries, as_json)


@app.command()
def revert(
    context: typer.Context,
    generation: Annotated[int | None, typer.Argument(help="What to go back to.", min=0)] = None,
    offline: Offline = False,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Make the route what it was, by the same path as `nereid route set`.

    Without GENERATION that is the newest entry of the history that is another route; done twice, it goes
    there and back. Of several entries with that GENERATION, it is the newest that is another route.
    """
    with reporting():
        from nereid.routes import change

        _change(context, change.reverted(generation), offline, route, repository)


def _change(context: typer.Context, propose: "Propose", offline: bool, route: str, repository: Path) -> None:
    from nereid.routes import change
    from nereid.routes import target as routes

    target = routes.find_route(repository, route)
    server = None if offline else _server(context, repository)
    print(change.change(target, propose, server, offline))


def _proposal(words: list[str], file: str) -> "Propose | None":
    from nereid.routes import change

    weights = change.read_weights(words)
    if weights and file:
        raise WrongUsage("give either NAME=WEIGHT… or a whole route with --file, not both")
    if file:
        return change.replaced(_read(file), "stdin" if file == "-" else file)
    return change.reweighted(weights) if weights else None


def _read(file: str) -> bytes:
    from nereid.routing.route_file import read_all

    try:
        with contextlib.nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as opened:
            return read_all(opened, file)
    except OSError as error:
        raise WrongUsage(f"cannot read '{file}': {error.strerror}") from None


def _headers(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    for word, (name, equals, _) in zip(words, pairs, strict=True):
        if not name or not equals:
            raise WrongUsage(f"expected --header NAME=VALUE, got '{word}'")
    return {name.lower(): value for name, _, value in pairs}


def _server(context: typer.Context, repository: Path) -> "RunningServer | None":
    from nereid.routes.served import RunningServer

    record = find_server(context, repository)
    return RunningServer(record) if record else None

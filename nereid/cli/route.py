"""`nereid route`: show and change the routes of a repository."""

import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from nereid.application.chosen_models import changeable_repository
from nereid.backends.routing.assignment import LoadedRoute, Route, shares
from nereid.base.assets import REPOSITORY
from nereid.base.contract import ROUTE_KEY_HEADER, VARIANT_HEADER, VERSION_HEADER
from nereid.base.errors import WrongUsage
from nereid.base.files import read_at_most
from nereid.cli.options import AsJson, Repository, complete_model, complete_variant
from nereid.cli.server_options import find_server, with_server
from nereid.cli.tables import print_table
from nereid.server.run_dir import ServerInfo

if TYPE_CHECKING:  # each command imports what it needs, so that the others start faster
    from nereid.models.routes.change import Difference, Propose, ServedRouteStatus
    from nereid.models.routes.explain import Explanation
    from nereid.models.routes.location import RouteChange, RouteFileSnapshot, RouteLocation

app = typer.Typer(help="Show, change and revert the routes of a repository; invalid changes are rejected.")

RouteName = Annotated[
    str,
    typer.Option(
        "--model",
        help="Name of the route.",
        show_default="the only route of the repository",
        autocompletion=complete_model,
    ),
]
Weights = Annotated[
    list[str] | None,
    typer.Argument(help="New weights of existing variants.", metavar="NAME=WEIGHT…"),
]
NewFile = Annotated[
    str, typer.Option("--file", help="Complete new route file; `-` reads stdin.", metavar="FILE|-")
]
Offline = Annotated[
    bool, typer.Option("--offline", help="Write the file without checking it on the running server.")
]


@app.command()
@with_server
def show(
    context: typer.Context,
    as_json: AsJson = False,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Show the route file, and whether the running server serves this route."""
    show_route(*_read(repository, route), find_server(context, repository), as_json)


@app.command("set")
@with_server
def set_route(
    context: typer.Context,
    weights: Weights = None,
    file: NewFile = "",
    offline: Offline = False,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Change weights of variants, or replace the whole route, and wait until the server serves it.

    Every model that the route names must be ready on the running server. The generation increases by one.
    """
    propose = _proposal(weights or [], file)
    if propose is None:
        raise WrongUsage("nothing to set: expected NAME=WEIGHT…, or a complete route with --file")
    _change(context, propose, offline, route, repository)


@app.command()
def diff(
    weights: Weights = None,
    file: NewFile = "",
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Show the changes that `nereid route set` would make, and the fraction of sticky keys that would move.

    Nothing is written. Without arguments, the current route is compared with the previous one.
    """
    from nereid.models.routes import change

    location, current = _read(repository, route)
    if propose := _proposal(weights or [], file):
        planned = change.plan(location, propose)
        old, new = planned.current.route(), planned.loaded.route
    elif before := change.previous(current):
        old, new = before, current.route()
    else:
        print("the history has no previous route")
        return
    _print_diff(change.differences(old, new), change.describe_moves(change.moves(old, new)))


@app.command()
def explain(
    key: Annotated[str, typer.Option(help="Route key of the caller (header `x-route-key`).")] = "",
    header: Annotated[
        list[str] | None, typer.Option(help="Header of the request. May be repeated.", metavar="NAME=VALUE")
    ] = None,
    variant: Annotated[
        str,
        typer.Option(
            help="Variant that the request names (header `x-variant`).", autocompletion=complete_variant
        ),
    ] = "",
    version: Annotated[
        str, typer.Option(help="Version that the request names (header `x-model-version`).")
    ] = "",
    as_json: AsJson = False,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Show which variant would answer a request if all variants are healthy, and why."""
    from nereid.models.routes import explain
    from nereid.models.routes.location import load_current_route

    option_headers = {VARIANT_HEADER: variant, VERSION_HEADER: version, ROUTE_KEY_HEADER: key}
    parameters = _headers(header or []) | {name: value for name, value in option_headers.items() if value}
    loaded = load_current_route(*_read(repository, route))
    _print_explanation(explain.explain(loaded, parameters), as_json)


@app.command()
def history(as_json: AsJson = False, route: RouteName = "", repository: Repository = REPOSITORY) -> None:
    """List the route's history, newest first."""
    location, current = _read(repository, route)
    _report_damage(location)
    _print_history(current.all_entries, as_json)


@app.command()
@with_server
def revert(
    context: typer.Context,
    generation: Annotated[
        int | None,
        typer.Argument(
            help="Generation to restore.", metavar="GENERATION", min=0, show_default="the previous route"
        ),
    ] = None,
    offline: Offline = False,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Restore an earlier route, with the same checks as `nereid route set`.

    Without GENERATION, the previous route is restored; a second revert undoes the first. If several entries
    have that GENERATION, the newest one that differs from the current route is used.
    """
    from nereid.models.routes import change
    from nereid.models.routes.location import find_route

    _report_damage(find_route(changeable_repository(repository), route))
    _change(context, change.propose_revert(generation), offline, route, repository)


@app.command()
@with_server
def fallback(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Variants to use, in this order, while the default variant is unreachable.",
            metavar="VARIANT…",
            autocompletion=complete_variant,
        ),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Copy the default variant's model to the CPU as the first fallback.")
    ] = False,
    offline: Offline = False,
    route: RouteName = "",
    repository: Repository = REPOSITORY,
) -> None:
    """Set the variants that answer while the default variant is unreachable.

    With --cpu, the default variant's model is copied to NAME_cpu, which runs on the CPU in every profile and
    keeps the version of its network. The copy is loaded and becomes a variant without traffic.
    """
    from nereid.models.publish.add import add_cpu_fallback
    from nereid.models.routes import change

    if bool(names) == cpu:
        raise WrongUsage("expected either variant names or --cpu")
    if cpu and offline:
        raise WrongUsage("--cpu excludes --offline: without a server, the copy is loaded at the next start")
    if names:
        _change(context, change.with_fallbacks(names), offline, route, repository)
        return
    server_info = find_server(context, repository)
    name = add_cpu_fallback(changeable_repository(repository), route, server_info, print)
    print(f"{name}: first fallback; its version stays, and nereid retire keeps the files that it needs")


def _read(repository: Path, route: str) -> "tuple[RouteLocation, RouteFileSnapshot]":
    from nereid.models.routes import location as routes

    location = routes.find_route(repository, route)
    return location, routes.read_route_file(location)


def _report_damage(location: "RouteLocation") -> None:
    if note := location.history.note_on_damage():
        print(note, file=sys.stderr)


def _change(context: typer.Context, propose: "Propose", offline: bool, route: str, repository: Path) -> None:
    from nereid.models.routes import change
    from nereid.models.routes.location import find_route

    location = find_route(changeable_repository(repository), route)
    server_info = None if offline else find_server(context, repository)
    print(change.change(location, propose, server_info, offline))


def _proposal(assignments: list[str], file: str) -> "Propose | None":
    from nereid.models.routes import change

    weights = change.read_weights(assignments)
    if weights and file:
        raise WrongUsage("expected either NAME=WEIGHT… or --file, got both")
    if file:
        return change.propose_content(_content(file), "stdin" if file == "-" else file)
    return change.propose_weights(weights) if weights else None


def _content(file: str) -> bytes:
    from nereid.backends.routing.route_file import MAX_BYTES

    try:
        with contextlib.nullcontext(sys.stdin.buffer) if file == "-" else Path(file).open("rb") as opened:
            return read_at_most(opened, MAX_BYTES, file)
    except OSError as error:
        raise WrongUsage(f"cannot read '{file}': {error.strerror}") from None


def _headers(assignments: list[str]) -> dict[str, str]:
    pairs = [assignment.partition("=") for assignment in assignments]
    for assignment, (name, equals, _) in zip(assignments, pairs, strict=True):
        if not name or not equals:
            raise WrongUsage(f"expected --header NAME=VALUE, got '{assignment}'")
    return {name.lower(): value for name, _, value in pairs}


def show_route(
    location: "RouteLocation", current: "RouteFileSnapshot", server_info: ServerInfo | None, as_json: bool
) -> None:
    """Print a route, and whether the server serves it.

    Raises:
        OperationFailed, InvalidConfig: the route file is invalid, or names a model that does not exist.
    """
    from nereid.models.routes.change import served_status
    from nereid.models.routes.location import describe, load_current_route, percent

    loaded = load_current_route(location, current)
    route, breaker = loaded.route, loaded.route.breaker
    status, served = served_status(server_info, location.name, loaded.sha256)
    if as_json:
        print(json.dumps(_as_document(location, loaded, served, status)))
        return
    _print_variants(loaded, served)
    _print_shadows(route)
    print(
        f"default {route.default}, at most {route.max_in_flight} requests in flight, "
        f"shadowed only below {route.shadow_max_in_flight} requests in flight"
    )
    if route.has_fallbacks:
        order = [*route.fallbacks, *(["the configured answer"] if route.answer else [])]
        print(f"while {route.default} is unreachable: {', then '.join(order)}")
    print(
        f"breaker: opens at {percent(breaker.error_ratio)} failures of {breaker.min_requests} requests or "
        f"more in {breaker.window_s:g} s, tries again after {breaker.open_s:g} s"
    )
    print(f"{location.name}: {describe(route)}, SHA-256 {loaded.sha256}")
    print(status)


def _print_diff(differences: "list[Difference]", moved: str) -> None:
    if not differences:
        print("no differences")
        return
    print_table("field", "old", "new", rows=[(change.path, change.old, change.new) for change in differences])
    print(moved)


def _print_explanation(explanation: "Explanation", as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(explanation)))
        return
    print(explanation.why)
    if explanation.candidates:
        rows = [
            (c.variant, f"{c.unit:.6f}", f"{c.weight:g}", f"{c.score:.6g}") for c in explanation.candidates
        ]
        print_table("variant", "hash value", "weight", "score", rows=rows)
    if explanation.fallbacks:
        print(f"while it is unreachable: {', then '.join(explanation.fallbacks)}")
    for shadow, likely in explanation.mirrored.items():
        print(f"{_how_likely(likely)} mirrored to shadow {shadow}")
    for name in explanation.ignored:
        print(f"header {name!r} has no effect on any route")


def _print_history(entries: "tuple[RouteChange, ...]", as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(entries[::-1]).decode())
        return
    rows = [
        (
            str(entry.generation),
            entry.time.astimezone().replace(tzinfo=None).isoformat(" ", "seconds"),
            entry.user,
            _weights(entry),
            entry.note,
            entry.sha256[:12],
        )
        for entry in reversed(entries)
    ]
    print_table("generation", "when", "who", "weights", "note", "SHA-256", rows=rows)


def _print_variants(loaded: LoadedRoute, served: "ServedRouteStatus | None") -> None:
    from nereid.models.routes.location import percent

    variants, variant_shares = loaded.route.variants, shares(loaded.route)
    columns = ["variant", "model", "version", "network", "weight", "share", "deadline"]
    rows = []
    for v in variants:
        version, network = str(v.version), loaded.network_versions[v.name]
        weights = f"{v.weight:g}", percent(variant_shares[v.name])
        rows.append([v.name, v.model, version, network, *weights, _ms(v.deadline_ms)])
    if served:
        columns.append("breaker")
        for row in rows:
            row.append(_breakers(loaded, served).get(row[0], "—"))
    if any(variant.headers for variant in variants):
        columns.append("headers")
        for row, variant in zip(rows, variants, strict=True):
            row.append("\n".join(f"{name}: {', '.join(values)}" for name, values in variant.headers.items()))
    print_table(*columns, rows=rows)


def _print_shadows(route: Route) -> None:
    rows = [(s.name, s.model, str(s.version), f"{s.percent:g} %", _ms(s.deadline_ms)) for s in route.shadows]
    if rows:
        print_table("shadow", "model", "version", "mirrored", "deadline", rows=rows)


def _as_document(
    location: "RouteLocation", loaded: LoadedRoute, served: "ServedRouteStatus | None", status: str
) -> dict[str, Any]:
    return {
        "route": location.name,
        "file": str(location.path),
        "sha256": loaded.sha256,
        "generation": loaded.route.generation,
        "status": status,
        "served_sha256": sorted(served.sha256s) if served else None,
        "shares": shares(loaded.route),
        "network_versions": dict(loaded.network_versions),
        "breakers": _breakers(loaded, served) if served else {},
        "document": msgspec.to_builtins(loaded.route),
    }


def _breakers(loaded: LoadedRoute, served: "ServedRouteStatus") -> dict[str, str]:
    versions = ((variant.name, loaded.network_versions[variant.name]) for variant in loaded.route.variants)
    return {pair[0]: served.breakers[pair] for pair in versions if pair in served.breakers}


def _weights(entry: "RouteChange") -> str:
    route = entry.parsed()
    return ", ".join(f"{v.name} {v.weight:g}" for v in route.variants) if route else "invalid route"


def _how_likely(share: float) -> str:
    from nereid.models.routes.location import percent

    fixed: Mapping[float, str] = {0.0: "not", 1.0: "always"}
    return fixed.get(share, f"{percent(share)} of such requests are")


def _ms(value: int) -> str:
    return f"{value:,} ms"

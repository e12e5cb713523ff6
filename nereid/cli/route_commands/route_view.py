"""Output of the `nereid route` commands: tables or JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from nereid.backends.routing.assignment import Route, Table, Variant, shares
from nereid.cli.tables import print_table
from nereid.models.routes.change import Difference, RunningServer, Served, served_status
from nereid.models.routes.explain import Explanation
from nereid.models.routes.target import (
    RouteChange,
    RouteLocation,
    RouteState,
    describe,
    percent,
    present_table,
)


def show(target: RouteLocation, present: RouteState, server: RunningServer | None, as_json: bool) -> None:
    """Print a route, and whether the server serves it.

    Raises:
        OperationFailed, InvalidConfig: the route file is invalid, or names a model that does not exist.
    """
    table = present_table(target, present)
    route, breaker = table.route, table.route.breaker
    status, served = served_status(server, target.name, table.sha256)
    if as_json:
        print(json.dumps(_as_document(target, table, served, status)))
        return
    _print_variants(table, served)
    _print_shadows(route)
    print(
        f"default {route.default}, at most {route.max_in_flight} requests in flight, "
        f"mirrored below {route.shadow_max_in_flight}"
    )
    if route.has_fallbacks:
        order = [*route.fallbacks, *(["the configured answer"] if route.answer else [])]
        print(f"while {route.default} is unreachable: {', then '.join(order)}")
    print(
        f"breaker: opens at {percent(breaker.error_ratio)} failures of {breaker.min_requests} requests or "
        f"more in {breaker.window_s:g} s, tries again after {breaker.open_s:g} s"
    )
    print(f"{target.name}: {describe(route)}, SHA-256 {table.sha256}")
    print(status)


def print_diff(found: list[Difference], moved: str) -> None:
    """Print the differences between two routes."""
    if not found:
        print("no differences")
        return
    print_table("field", "old", "new", rows=[(each.path, each.old, each.new) for each in found])
    print(moved)


def print_explanation(explanation: Explanation, as_json: bool) -> None:
    """Print the variant that would answer a request, and the reason."""
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


def print_history(entries: tuple[RouteChange, ...], as_json: bool) -> None:
    """Print a history, newest first."""
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


def _print_variants(table: Table, served: Served | None) -> None:
    variants, given = table.route.variants, shares(table.route)
    columns = ["variant", "model", "version", "network", "weight", "share", "deadline"]
    rows = []
    for v in variants:
        version, network = str(v.version), table.network_versions[v.name]
        weights = f"{v.weight:g}", percent(given[v.name])
        rows.append([v.name, v.model, version, network, *weights, _ms(v.deadline_ms)])
    if served:
        columns.append("breaker")
        for row in rows:
            row.append(_breakers(table, served).get(row[0], "—"))
    if any(variant.headers for variant in variants):
        columns.append("headers")
        for row, variant in zip(rows, variants, strict=True):
            row.append(_headers(variant))
    print_table(*columns, rows=rows)


def _print_shadows(route: Route) -> None:
    rows = [(s.name, s.model, str(s.version), f"{s.percent:g} %", _ms(s.deadline_ms)) for s in route.shadows]
    if rows:
        print_table("shadow", "model", "version", "mirrored", "deadline", rows=rows)


def _as_document(target: RouteLocation, table: Table, served: Served | None, status: str) -> dict[str, Any]:
    return {
        "route": target.name,
        "file": str(target.path),
        "sha256": table.sha256,
        "generation": table.route.generation,
        "status": status,
        "served_sha256": sorted(served.sha256s) if served else None,
        "shares": shares(table.route),
        "network_versions": dict(table.network_versions),
        "breakers": _breakers(table, served) if served else {},
        "document": msgspec.to_builtins(table.route),
    }


def _breakers(table: Table, served: Served) -> dict[str, str]:
    versions = ((each.name, table.network_versions[each.name]) for each in table.route.variants)
    return {pair[0]: served.breakers[pair] for pair in versions if pair in served.breakers}


def _weights(entry: RouteChange) -> str:
    route = entry.parsed()
    return ", ".join(f"{v.name} {v.weight:g}" for v in route.variants) if route else "invalid route"


def _headers(variant: Variant) -> str:
    return "\n".join(f"{name}: {', '.join(values)}" for name, values in variant.headers.items())


def _how_likely(share: float) -> str:
    fixed: Mapping[float, str] = {0.0: "not", 1.0: "always"}
    return fixed.get(share, f"{percent(share)} of such requests are")


def _ms(value: int) -> str:
    return f"{value:,} ms"

"""Changes to a route: proposal, check, write, history, and confirmation by the server."""

import contextlib
import http.client
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from nereid.backends.routing import route_file
from nereid.backends.routing.assignment import (
    LoadedRoute,
    Route,
    Shadow,
    Variant,
    assign,
    format_route,
    parse_route,
)
from nereid.backends.triton.metrics import ROUTE_PREFIX
from nereid.base import files, prometheus_text
from nereid.base.errors import InvalidConfig, OperationFailed, WrongUsage, no_server
from nereid.base.journal import Append
from nereid.base.prometheus_text import MetricSamples
from nereid.models.routes.location import (
    RouteChange,
    RouteFileSnapshot,
    RouteLocation,
    describe,
    read_route_file,
)
from nereid.server.model_control import RESPONSE_TIMEOUT_S, ModelControl, NotReached
from nereid.server.run_dir import ServerInfo

SERVED_STATUS, NO_SERVER_STATUS = "served", "no server runs"
BREAKER_STATES = {0: "closed", 1: "half-open", 2: "open"}
SAMPLE_KEYS = 10_000
ABSENT = "—"
SERVED_TIMEOUT_S = 5.0
POLL_S = 0.05
MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class ServedRouteStatus:
    """The SHA-256 of the route files in use (one if all instances agree), and the states of the breakers.

    `breakers` contains the variants that received requests, by variant and version of the network. If
    instances differ, the most open state counts.
    """

    sha256s: frozenset[str]
    breakers: Mapping[tuple[str, str], str]


def served_status(
    server_info: ServerInfo | None, route: str, sha256: str
) -> tuple[str, ServedRouteStatus | None]:
    """Return whether the server uses the route file with this SHA-256, and the details it reports.

    The status is `SERVED_STATUS`, or a phrase that says why not.
    """
    if server_info is None:
        return NO_SERVER_STATUS, None
    try:
        served = read_served_status(read_samples(server_info, route), route)
    except OperationFailed as error:
        return f"not confirmed: {error}", None
    if served.sha256s == {sha256}:
        return SERVED_STATUS, served
    others = ", ".join(sorted(other[:12] for other in served.sha256s - {sha256}))
    has = f"uses SHA-256 {others}" if others else f"reports no route '{route}'"
    return f"not served yet: the server {has}", served


def read_samples(server_info: ServerInfo, route: str, timeout_s: float = RESPONSE_TIMEOUT_S) -> MetricSamples:
    """Read the metrics of a route on a server.

    Raises:
        NotReached: the server's metrics page does not respond.
    """
    url = server_info.url("metrics")
    try:
        text = prometheus_text.fetch(url, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        raise NotReached(f"the server at {url} does not respond: {error}") from None
    return MetricSamples.parse(text, (ROUTE_PREFIX,), {"route": route})


def read_served_status(samples: MetricSamples, route: str) -> ServedRouteStatus:
    """Return what a metrics page says about one route."""
    labels = {"route": route}
    served: dict[str, tuple[float, str]] = {}
    since_by_file = samples.sums(
        f"{ROUTE_PREFIX}served_since_seconds", "model_instance", "sha256", labels=labels
    )
    for (instance, sha256), since in since_by_file.items():
        # A killed process leaves its series behind: the newest one counts.
        served[instance] = max((since, sha256), served.get(instance, (since, sha256)))
    states: dict[tuple[str, str], int] = {}
    instances = samples.sums(
        f"{ROUTE_PREFIX}breaker_state", "variant", "version", "model_instance", labels=labels
    )
    for (variant, version, _), state in instances.items():
        states[variant, version] = max(int(state), states.get((variant, version), 0))
    breakers = {variant: BREAKER_STATES.get(state, str(state)) for variant, state in states.items()}
    return ServedRouteStatus(frozenset(sha256 for _, sha256 in served.values()), breakers)


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of a route: its path, such as `variants[v1].weight`, and its old and new value."""

    path: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old} → {self.new}"


def differences(old: Route, new: Route) -> list[Difference]:
    """Return the fields in which two routes differ, without the generation; defaults count as written."""
    before, after = dict(_flat(old)), dict(_flat(new))
    paths = [*before, *(path for path in after if path not in before)]
    pairs = [(path, before.get(path, ABSENT), after.get(path, ABSENT)) for path in paths]
    return [Difference(path, str(a), str(b)) for path, a, b in pairs if a != b]


def moves(old: Route, new: Route) -> dict[tuple[str, str], float]:
    """Return the fractions of sticky keys that change variant, by variant before and after.

    They are measured on `SAMPLE_KEYS` keys: `key-0`, `key-1` and so on.
    """
    keys = [f"key-{number}" for number in range(SAMPLE_KEYS)]
    pairs = Counter((assign(old, key).name, assign(new, key).name) for key in keys)
    return {pair: count / SAMPLE_KEYS for pair, count in pairs.most_common() if pair[0] != pair[1]}


def describe_moves(moved: dict[tuple[str, str], float]) -> str:
    """Return the moves of sticky keys as one line."""
    if not moved:
        return "no sticky key moves"
    total = f"{sum(moved.values()) * 100:.1f} % of sticky keys move: "
    if len(moved) == 1:
        return total + " → ".join(*moved)
    return total + ", ".join(f"{share * 100:.1f} % {old} → {new}" for (old, new), share in moved.items())


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every field; variants and shadows are identified by their names."""
    if isinstance(value, Struct):
        for field in fields(value):
            if field.name != "generation":
                name = f"{path}.{field.encode_name}" if path else field.encode_name
                yield from _flat(getattr(value, field.name), name)
    elif value and isinstance(value, tuple) and isinstance(value[0], (Variant, Shadow)):
        yield path, ", ".join(item.name for item in value)
        for item in value:
            yield from _flat(item, f"{path}[{item.name}]")
    elif isinstance(value, dict):
        for name, values in value.items():
            yield f"{path}[{name}]", ", ".join(values) if isinstance(values, tuple) else values
    elif value and isinstance(value, tuple):
        yield path, ", ".join(value)
    elif value != ():
        yield path, value


@dataclass(frozen=True, slots=True)
class Proposal:
    """A new route without its generation, and a note for the history."""

    route: Route
    note: str


Propose = Callable[[RouteFileSnapshot], Proposal]


class Superseded(OperationFailed):
    """The change was written, and another change followed before the server used it."""


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """A checked change from the current state to the new route, which is served as `loaded`."""

    current: RouteFileSnapshot
    loaded: LoadedRoute
    note: str

    @property
    def is_needed(self) -> bool:
        """Return whether the new route differs from the current one."""
        return self.current.differs_from(self.loaded.route)


def read_weights(assignments: list[str]) -> dict[str, float]:
    """Parse assignments such as `NAME=WEIGHT`.

    Raises:
        WrongUsage: an assignment has another form, or a name occurs twice.
    """
    weights: dict[str, float] = {}
    for assignment in assignments:
        name, _, text = assignment.rpartition("=")
        is_number = re.fullmatch(r"[+-]?(\d{1,300}(\.\d*)?|\.\d+)([eE][+-]?\d+)?", text, re.ASCII)
        if not name or not is_number or not math.isfinite(float(text)):
            raise WrongUsage(f"expected NAME=WEIGHT, such as v2=10, got '{assignment}'")
        if name in weights:
            raise WrongUsage(f"expected one weight for each variant, got two for '{name}'")
        weights[name] = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    return weights


def propose_weights(weights: Mapping[str, float]) -> Propose:
    """Propose the current route with new weights."""

    def propose(current: RouteFileSnapshot) -> Proposal:
        route = current.route()
        known = [variant.name for variant in route.variants]
        if unknown := [name for name in weights if name not in known]:
            raise WrongUsage(f"unknown variant '{unknown[0]}': expected one of {', '.join(known)}")
        document = msgspec.to_builtins(route)
        for variant in document["variants"]:
            variant["weight"] = weights.get(variant["name"], variant["weight"])
        return Proposal(parse_route(msgspec.json.encode(document)), "set")

    return propose


def with_fallbacks(names: Sequence[str]) -> Propose:
    """Propose the current route with these variants as its fallbacks, in this order."""

    def propose(current: RouteFileSnapshot) -> Proposal:
        document = msgspec.to_builtins(current.route()) | {"fallbacks": names}
        try:
            return Proposal(parse_route(msgspec.json.encode(document)), "set fallbacks")
        except InvalidConfig as error:
            raise WrongUsage(str(error)) from None

    return propose


def propose_content(content: bytes, source: str) -> Propose:
    """Propose the route in `content`, which was read from `source`."""

    def propose(current: RouteFileSnapshot) -> Proposal:
        try:
            return Proposal(parse_route(content), "set from file")
        except InvalidConfig as error:
            raise OperationFailed(f"{source}: {error}") from None

    return propose


def propose_revert(generation: int | None) -> Propose:
    """Propose the route of a generation, or the previous one (see `previous`).

    If a generation has several entries, the newest one that differs from the current file is used: a file
    that was edited by hand keeps its number.
    """

    def propose(current: RouteFileSnapshot) -> Proposal:
        pairs = _former(current, generation)
        different = [pair for pair in pairs if current.differs_from(pair[1])]
        if not pairs or (generation is None and not different):
            raise OperationFailed(_nothing_to_revert_to(current, generation))
        entry, route = (different or pairs)[0]
        return Proposal(route, f"revert to {entry.generation}")

    return propose


def previous(current: RouteFileSnapshot) -> Route | None:
    """Return the newest route of the history that differs from the file's, apart from the generation."""
    return next((route for _, route in _former(current, None) if current.differs_from(route)), None)


def _former(current: RouteFileSnapshot, generation: int | None) -> list[tuple[RouteChange, Route]]:
    entries = [e for e in reversed(current.all_entries) if generation in (None, e.generation)]
    return [(entry, route) for entry in entries if (route := entry.parsed())]


def _nothing_to_revert_to(current: RouteFileSnapshot, generation: int | None) -> str:
    if generation is None:
        return f"cannot revert '{current.path}': its history has no other route"
    known = sorted({entry.generation for entry, _ in _former(current, None)})
    generations = ", ".join(map(str, known)) or "none"
    return f"cannot revert: the history has no generation {generation}, it has: {generations}"


def plan(location: RouteLocation, propose: Propose) -> PlannedChange:
    """Check a change without a server, and without writing anything.

    Raises:
        WrongUsage: the proposal does not fit the route.
        OperationFailed, InvalidConfig: the new route is invalid, or names models that do not exist.
        OSError: the file or its history cannot be read.
    """
    current = read_route_file(location)
    proposal = propose(current)
    # The highest of all, because a file copied by hand may have any number.
    generation = max((entry.generation for entry in current.all_entries), default=0) + 1
    content = format_route(replace(proposal.route, generation=generation))
    return PlannedChange(current, route_file.load_route(location.config, content), proposal.note)


def change(
    location: RouteLocation,
    propose: Propose,
    server_info: ServerInfo | None,
    is_offline: bool = False,
    wait_s: float = SERVED_TIMEOUT_S,
) -> str:
    """Check, write and record a change of a route, and wait until it is served; return a line about it.

    If the command is killed, the file has either the old or the new content. The history may then lack the
    new content, and the next change adds it.

    Raises:
        WrongUsage: the proposal does not fit the route.
        OperationFailed, InvalidConfig: the route is invalid, no server runs, or the server lacks a model or
            does not use the route.
        OSError: a file cannot be read or written.
    """
    if not (planned := plan(location, propose)).is_needed:
        return _nothing_to_change(location, planned.current, server_info)
    if server_info is None and not is_offline:
        raise no_server(location.repository, ", or write the route with --offline")
    with location.history.locked() as append:
        # Again under the lock, as another command may have changed the route.
        if not (planned := plan(location, propose)).is_needed:
            return _nothing_to_change(location, planned.current, server_info)
        if server_info:
            route_file.check_ready(planned.loaded.route, ModelControl(server_info).is_ready)
        _write(location, planned, append)
    summary = f"{location.name}: {describe(planned.loaded.route)}"
    if server_info is None:
        return f"{summary}, written without a server"
    return f"{summary}, served after {_wait_served(location, planned.loaded, server_info, wait_s):.1f} s"


def change_with_retry(
    location: RouteLocation,
    propose: Propose,
    server_info: ServerInfo | None,
    wait_s: float = SERVED_TIMEOUT_S,
) -> str:
    """Change a route, and try again if another change follows before the server uses this one.

    Arguments, result and errors are as for `change`, but no server needs to run.
    """
    for _ in range(MAX_ATTEMPTS - 1):
        with contextlib.suppress(Superseded):
            return change(location, propose, server_info, is_offline=True, wait_s=wait_s)
    return change(location, propose, server_info, is_offline=True, wait_s=wait_s)


def _nothing_to_change(
    location: RouteLocation, current: RouteFileSnapshot, server_info: ServerInfo | None
) -> str:
    status = f", {served_status(server_info, location.name, current.sha256)[0]}" if server_info else ""
    return f"{location.name}: nothing to change, {describe(current.route())}{status}"


def _write(location: RouteLocation, planned: PlannedChange, append: Append[RouteChange]) -> None:
    if planned.current.unrecorded:
        append(planned.current.unrecorded)
    route = planned.loaded.route
    content = format_route(route)
    files.replace(location.path, content)
    try:
        append(RouteChange.of(content, planned.note, route.generation, datetime.now(UTC), os.getuid()))
    except OSError as error:
        raise OperationFailed(f"wrote '{location.path}', but not its history: {error.strerror}") from None


def _wait_served(
    location: RouteLocation, loaded: LoadedRoute, server_info: ServerInfo, wait_s: float
) -> float:
    begin, written = time.monotonic(), f"wrote generation {loaded.route.generation} of '{location.path}'"
    while True:
        status, _ = served_status(server_info, location.name, loaded.sha256)
        passed_s = time.monotonic() - begin
        if status == SERVED_STATUS:
            return passed_s
        if read_route_file(location).sha256 != loaded.sha256:
            raise Superseded(f"{written}, but another change followed")
        if passed_s > wait_s:
            raise OperationFailed(
                f"{written}, but after {wait_s:g} s it is {status}; fix: see the reason in the server's log"
            )
        time.sleep(POLL_S)

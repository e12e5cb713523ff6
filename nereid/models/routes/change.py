"""Changes of a route: proposal, check, write, history, and confirmation by the server."""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from msgspec.structs import replace

from nereid.backends.routing import route_file
from nereid.backends.routing.assignment import Route, Table, format_route, parse_route
from nereid.base import files
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.base.journal import Append
from nereid.base.serving_errors import InvalidConfig
from nereid.models.routes.served import SERVED, RunningServer, served_status
from nereid.models.routes.target import RouteChange, RouteLocation, RouteState, describe, read_state

SERVED_S = 5.0
POLL_S = 0.05
MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Proposal:
    """A new route without its generation, and a note for the history."""

    route: Route
    note: str


Propose = Callable[[RouteState], Proposal]


class Superseded(OperationFailed):
    """The change was written, and another change followed before the server used it."""


@dataclass(frozen=True, slots=True)
class PlannedChange:
    """A checked change from the present state to the new route, which is served as `table`."""

    present: RouteState
    table: Table
    note: str

    @property
    def route(self) -> Route:
        """Return the new route, with its generation."""
        return self.table.route

    @property
    def is_needed(self) -> bool:
        """Return whether the new route differs from the present one."""
        return self.present.differs_from(self.route)


def read_weights(words: list[str]) -> dict[str, float]:
    """Parse `NAME=WEIGHT` words.

    Raises:
        WrongUsage: a word has another form, or a name occurs twice.
    """
    weights: dict[str, float] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        is_number = re.fullmatch(r"[+-]?(\d{1,300}(\.\d*)?|\.\d+)([eE][+-]?\d+)?", text, re.ASCII)
        if not name or not is_number or not math.isfinite(float(text)):
            raise WrongUsage(f"expected NAME=WEIGHT, such as v2=10, got '{word}'")
        if name in weights:
            raise WrongUsage(f"expected one weight for each variant, got two for '{name}'")
        weights[name] = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    return weights


def reweighted(weights: Mapping[str, float]) -> Propose:
    """Propose the present route with new weights."""

    def propose(present: RouteState) -> Proposal:
        route = present.route()
        known = [variant.name for variant in route.variants]
        if unknown := [name for name in weights if name not in known]:
            raise WrongUsage(f"unknown variant '{unknown[0]}': expected one of {', '.join(known)}")
        document = msgspec.to_builtins(route)
        for variant in document["variants"]:
            variant["weight"] = weights.get(variant["name"], variant["weight"])
        return Proposal(parse_route(msgspec.json.encode(document)), "set")

    return propose


def with_fallbacks(names: Sequence[str]) -> Propose:
    """Propose the present route with these variants as its fallbacks, in this order."""

    def propose(present: RouteState) -> Proposal:
        document = msgspec.to_builtins(present.route()) | {"fallbacks": names}
        try:
            return Proposal(parse_route(msgspec.json.encode(document)), "set fallbacks")
        except InvalidConfig as error:
            raise WrongUsage(str(error)) from None

    return propose


def replaced(text: bytes, source: str) -> Propose:
    """Propose the route in `text`, which was read from `source`."""

    def propose(present: RouteState) -> Proposal:
        try:
            return Proposal(parse_route(text), "set from file")
        except InvalidConfig as error:
            raise OperationFailed(f"{source}: {error}") from None

    return propose


def reverted(generation: int | None) -> Propose:
    """Propose the route of a generation, or the previous one (see `previous`).

    If a generation has several entries, the newest one that differs from the present file is used: a file
    that was edited by hand keeps its number.
    """

    def propose(present: RouteState) -> Proposal:
        found = _former(present, generation)
        different = [pair for pair in found if present.differs_from(pair[1])]
        if not found or (generation is None and not different):
            raise OperationFailed(_nothing_to_revert_to(present, generation))
        entry, route = (different or found)[0]
        return Proposal(route, f"revert to {entry.generation}")

    return propose


def previous(present: RouteState) -> Route | None:
    """Return the newest route of the history that differs from the file's, apart from the generation."""
    return next((route for _, route in _former(present, None) if present.differs_from(route)), None)


def _former(present: RouteState, generation: int | None) -> list[tuple[RouteChange, Route]]:
    """Return the former routes, newest first, of one generation or of all."""
    entries = [e for e in reversed(present.all_entries) if generation in (None, e.generation)]
    return [(entry, route) for entry in entries if (route := entry.parsed())]


def _nothing_to_revert_to(present: RouteState, generation: int | None) -> str:
    if generation is None:
        return f"cannot revert '{present.path}': its history has no other route"
    known = sorted({entry.generation for entry, _ in _former(present, None)})
    generations = ", ".join(map(str, known)) or "none"
    return f"cannot revert: the history has no generation {generation}, it has: {generations}"


def plan(target: RouteLocation, propose: Propose) -> PlannedChange:
    """Check a change without a server, and without writing anything.

    Raises:
        WrongUsage: the proposal does not fit the route.
        OperationFailed, InvalidConfig: the new route is invalid, or names models that do not exist.
        OSError: the file or its history cannot be read.
    """
    present = read_state(target)
    proposal = propose(present)
    # The highest of all, as a file that was copied by hand may have any number.
    generation = max((entry.generation for entry in present.all_entries), default=0) + 1
    text = format_route(replace(proposal.route, generation=generation))
    return PlannedChange(present, route_file.read_table(target.config, text), proposal.note)


def change(
    target: RouteLocation,
    propose: Propose,
    server: RunningServer | None,
    is_offline: bool = False,
    wait_s: float = SERVED_S,
) -> str:
    """Check, write and record a change of a route, and wait until it is served; return a line about it.

    If the command is killed, the file has either the old or the new content. The history may then lack the
    new content, and the next change adds it.

    Args:
        target, propose: the route, and a function that returns its new content for the present state.
        server: the running server, which must have the models and use the route.
        is_offline: whether a change without a running server is allowed.
        wait_s: maximum wait until the server uses the route.

    Raises:
        WrongUsage: the proposal does not fit the route.
        OperationFailed, InvalidConfig: the route is invalid, no server runs, or the server lacks a model or
            does not use the route.
        OSError: a file cannot be read or written.
    """
    if not (planned := plan(target, propose)).is_needed:
        return _nothing_to_change(target, planned.present, server)
    if server is None and not is_offline:
        raise OperationFailed(
            f"no server runs for repository '{target.repository}'; "
            "fix: nereid serve, or write the route with --offline"
        )
    with target.history.locked() as append:
        # Again under the lock, as another command may have changed the route.
        if not (planned := plan(target, propose)).is_needed:
            return _nothing_to_change(target, planned.present, server)
        if server:
            route_file.check_ready(planned.route, server.is_ready)
        _write(target, planned, append)
    summary = f"{target.name}: {describe(planned.route)}"
    if server is None:
        return f"{summary}, written without a server"
    return f"{summary}, served after {_wait_served(target, planned.table, server, wait_s):.1f} s"


def change_with_retry(
    target: RouteLocation, propose: Propose, server: RunningServer | None, wait_s: float = SERVED_S
) -> str:
    """Change a route, and try again if another change follows before the server uses this one.

    Arguments, result and errors are those of `change`; a server need not run.
    """
    for _ in range(MAX_ATTEMPTS - 1):
        with contextlib.suppress(Superseded):
            return change(target, propose, server, is_offline=True, wait_s=wait_s)
    return change(target, propose, server, is_offline=True, wait_s=wait_s)


def _nothing_to_change(target: RouteLocation, present: RouteState, server: RunningServer | None) -> str:
    status = f", {served_status(server, target.name, present.sha256)[0]}" if server else ""
    return f"{target.name}: nothing to change, {describe(present.route())}{status}"


def _write(target: RouteLocation, planned: PlannedChange, append: Append[RouteChange]) -> None:
    if planned.present.unrecorded:
        append(planned.present.unrecorded)
    text = format_route(planned.route)
    files.replace(target.path, text)
    try:
        append(RouteChange.of(text, planned.note, planned.route.generation, datetime.now(UTC), os.getuid()))
    except OSError as error:
        raise OperationFailed(f"wrote '{target.path}', but not its history: {error.strerror}") from None


def _wait_served(target: RouteLocation, table: Table, server: RunningServer, wait_s: float) -> float:
    """Wait until the server uses `table`; return the seconds."""
    begin = time.monotonic()
    while True:
        status, _ = served_status(server, target.name, table.sha256)
        passed_s = time.monotonic() - begin
        if status == SERVED:
            return passed_s
        if read_state(target).sha256 != table.sha256:
            raise Superseded(
                f"wrote generation {table.route.generation} of '{target.path}', but another change followed"
            )
        if passed_s > wait_s:
            break
        time.sleep(POLL_S)
    generation = table.route.generation
    raise OperationFailed(
        f"wrote generation {generation} of '{target.path}', but after {wait_s:g} s it is {status}; "
        "fix: see the reason in the server's log"
    )

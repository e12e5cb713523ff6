"""Changes of a route: proposed, checked, written, kept in the history, and seen to be served."""

import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from nereid import files, json_lines
from nereid.errors import OperationFailed, WrongUsage
from nereid.routes import history as route_history
from nereid.routes.history import Entry
from nereid.routes.served import SERVED, Server, served_status
from nereid.routes.target import RouteLocation, RouteState, check, describe, read_state
from nereid.routing import route_file
from nereid.routing.assignment import Route, Table, format_route, parse_route
from nereid.serving_errors import InvalidConfig

SERVED_S = 5.0
POLL_S = 0.05
MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a route is to be, its generation aside, and what the history says of it."""

    route: Route
    note: str


Propose = Callable[[RouteState], Proposal]


class Superseded(OperationFailed):
    """The change was written, and another one followed before the server had taken it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A change that has been checked: from what is present to the new route, in use as `table`."""

    present: RouteState
    table: Table
    note: str

    @property
    def route(self) -> Route:
        """The new route, with its generation."""
        return self.table.route

    @property
    def is_needed(self) -> bool:
        """Whether the new route says anything else than the present one."""
        return self.present.differs_from(self.route)


def read_weights(words: list[str]) -> dict[str, float]:
    """Read `NAME=WEIGHT` words.

    Raises:
        WrongUsage: one is not that, or a name comes twice.
    """
    weights: dict[str, float] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        is_number = re.fullmatch(r"[+-]?(\d{1,300}(\.\d*)?|\.\d+)([eE][+-]?\d+)?", text, re.ASCII)
        if not name or not is_number or not math.isfinite(float(text)):
            raise WrongUsage(f"expected NAME=WEIGHT, such as v2=10, got '{word}'")
        if name in weights:
            raise WrongUsage(f"'{name}' has two weights")
        weights[name] = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    return weights


def reweighted(weights: Mapping[str, float]) -> Propose:
    """Propose the present route with other weights."""

    def propose(present: RouteState) -> Proposal:
        route = present.route()
        known = [variant.name for variant in route.variants]
        if unknown := [name for name in weights if name not in known]:
            raise WrongUsage(f"unknown variant '{unknown[0]}', known are: {', '.join(known)}")
        document = msgspec.to_builtins(route)
        for variant in document["variants"]:
            variant["weight"] = weights.get(variant["name"], variant["weight"])
        return Proposal(parse_route(msgspec.json.encode(document)), "set")

    return propose


def replaced(text: bytes, source: str) -> Propose:
    """Propose the route that `text` from `source` is."""

    def propose(present: RouteState) -> Proposal:
        try:
            return Proposal(parse_route(text), "set from file")
        except InvalidConfig as error:
            raise OperationFailed(f"{source}: {error}") from None

    return propose


def reverted(generation: int | None) -> Propose:
    """Propose what the route was: in that generation, or before it became what it is (see `previous`).

    Of several entries of one generation it is the newest that differs from the present file: a file that
    was edited by hand has the number of the one before.
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
    """Return the newest route of the history that differs from the file's, whatever the generations."""
    return next((route for _, route in _former(present, None) if present.differs_from(route)), None)


def _former(present: RouteState, generation: int | None) -> list[tuple[Entry, Route]]:
    """Return what the route has been, newest first, in one generation or ever."""
    entries = [e for e in reversed(present.all_entries) if generation in (None, e.generation)]
    return [(entry, route) for entry in entries if (route := entry.parsed())]


def _nothing_to_revert_to(present: RouteState, generation: int | None) -> str:
    if generation is None:
        return f"'{present.path}' has been nothing else: there is nothing to revert to"
    known = sorted({entry.generation for entry, _ in _former(present, None)})
    return f"the history has no generation {generation}, known are: {', '.join(map(str, known)) or 'none'}"


def plan(target: RouteLocation, propose: Propose) -> Plan:
    """Work out a change, without a server and without writing anything.

    Raises:
        WrongUsage: the proposal does not fit the route.
        OperationFailed, InvalidConfig: the new route is wrong, or names what is not in the repository.
        OSError: the file or its history cannot be read.
    """
    present = read_state(target)
    proposal = propose(present)
    # Also above the history's: a file that was put in place by hand may have any number.
    generation = max((entry.generation for entry in present.all_entries), default=0) + 1
    text = format_route(replace(proposal.route, generation=generation))
    return Plan(present, check(target, text), proposal.note)


def change(
    target: RouteLocation,
    propose: Propose,
    server: Server | None,
    is_offline: bool = False,
    wait_s: float = SERVED_S,
) -> str:
    """Change a route: check it, write it, record it, and wait until it is served; returns what was done.

    Killed at any point, the file is whole: the old one, or the new one. Then the history may lack the new
    one, and the next change adds it.

    Args:
        target: the route.
        propose: tells what it is to be.
        server: what has to be ready for it and to take it, if one runs.
        is_offline: whether no server need run.
        wait_s: how long to wait for the server.

    Raises:
        WrongUsage: the proposal does not fit the route.
        OperationFailed, InvalidConfig: it is wrong, no server runs, or that is not ready for it or has not
            taken it.
        OSError: a file cannot be read or written.
    """
    if not (planned := plan(target, propose)).is_needed:
        return _nothing_to_change(target, planned.present, server)
    if server is None and not is_offline:
        raise OperationFailed(
            f"no server of {target.config.folder.parent} runs; "
            "fix: start one, or write without asking with --offline"
        )
    with route_history.locked(target.history) as history:
        # Once more: until now another change may have come between.
        if not (planned := plan(target, propose)).is_needed:
            return _nothing_to_change(target, planned.present, server)
        if server:
            route_file.check_ready(planned.route, server.is_ready)
        _write(target, planned, history)
    told = f"{target.name}: {describe(planned.route)}"
    if server is None:
        return f"{told}, written without asking a server"
    return f"{told}, served after {_wait_served(target, planned.table, server, wait_s):.1f} s"


def change_with_retry(
    target: RouteLocation, propose: Propose, server: Server | None, wait_s: float = SERVED_S
) -> str:
    """Change a route, and once more if another change comes in between, which may have kept this one.

    The arguments, what is returned and what is raised are those of `change`; no server need run.
    """
    for _ in range(MAX_ATTEMPTS - 1):
        with contextlib.suppress(Superseded):
            return change(target, propose, server, is_offline=True, wait_s=wait_s)
    return change(target, propose, server, is_offline=True, wait_s=wait_s)


def _nothing_to_change(target: RouteLocation, present: RouteState, server: Server | None) -> str:
    told = f", {served_status(server, target.name, present.sha256)[0]}" if server else ""
    return f"{target.name}: nothing to change, {describe(present.route())}{told}"


def _write(target: RouteLocation, planned: Plan, history: BinaryIO) -> None:
    if planned.present.unrecorded:
        json_lines.append(history, planned.present.unrecorded)
    text = format_route(planned.route)
    files.replace(target.path, text)
    now, user_id = datetime.now(UTC), os.getuid()
    entry = route_history.make_entry(text, planned.note, planned.route.generation, now, user_id)
    try:
        json_lines.append(history, entry)
    except OSError as error:
        raise OperationFailed(f"'{target.path}' is written, its history is not: {error.strerror}") from None


def _wait_served(target: RouteLocation, table: Table, server: Server, wait_s: float) -> float:
    """Return after how many seconds the server served `table`."""
    begin = time.monotonic()
    while True:
        told, _ = served_status(server, target.name, table.sha256)
        passed_s = time.monotonic() - begin
        if told == SERVED:
            return passed_s
        if read_state(target).sha256 != table.sha256:
            raise Superseded(
                f"'{target.path}' was written, generation {table.route.generation}, and then changed again"
            )
        if passed_s > wait_s:
            break
        time.sleep(POLL_S)
    generation = table.route.generation
    raise OperationFailed(
        f"'{target.path}' is written, generation {generation}, but after {wait_s:g} s it is {told}; "
        "fix: see the server's log for the reason"
    )

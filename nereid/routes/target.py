"""A route of a repository: where its file and history lie, and what they hold."""

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from msgspec.structs import replace

from nereid.config.model_config import ModelConfig, read_pbtxt
from nereid.errors import OperationFailed, WrongUsage
from nereid.routes import history
from nereid.routes.history import Entry
from nereid.routing import route_file
from nereid.routing.assignment import Route, Table, parse_route, shares
from nereid.serving_errors import InvalidConfig

BACKEND = "ab_router"


@dataclass(frozen=True, slots=True)
class RouteLocation:
    """A route of a repository: its model's config, and where its file lies, links followed."""

    config: ModelConfig
    path: Path

    @property
    def name(self) -> str:
        """The model's name."""
        return self.config.name

    @property
    def history(self) -> Path:
        """Where the file's history lies."""
        return history.path_beside(self.path)


@dataclass(frozen=True, slots=True)
class RouteState:
    """A route file as it is: its text, None if there is no file, and its history, oldest first.

    `unrecorded` is what the history lacks of the present content.
    """

    path: Path
    text: bytes | None
    entries: tuple[Entry, ...]
    unrecorded: Entry | None

    @property
    def sha256(self) -> str:
        """SHA-256 of the file, empty if there is none."""
        return sha256(self.text).hexdigest() if self.text is not None else ""

    @property
    def all_entries(self) -> tuple[Entry, ...]:
        """The history as it will be once the present content is in it."""
        return (*self.entries, self.unrecorded) if self.unrecorded else self.entries

    def route(self) -> Route:
        """Return the route.

        Raises:
            OperationFailed: there is no file, or it holds none.
        """
        if self.text is None:
            raise OperationFailed(f"'{self.path}' is not there; fix: nereid route set --file FILE, or revert")
        try:
            return parse_route(self.text)
        except InvalidConfig as error:
            raise OperationFailed(
                f"'{self.path}': {error}; fix: correct it, or nereid route revert"
            ) from None

    def differs_from(self, route: Route | None) -> bool:
        """Tell whether the file's route is another one, whatever the generations."""
        try:
            return route is None or content(self.route()) != content(route)
        except OperationFailed:
            return True


def find_route(repository: Path, name: str = "") -> RouteLocation:
    """Return the route `name`, or the repository's only one.

    Raises:
        WrongUsage: no such repository or route, or several.
        InvalidConfig: its config does not say where its file lies.
    """
    if not repository.is_dir():
        raise WrongUsage(f"{repository} is no model repository: there is no such folder")
    found, broken = _route_names(repository)
    known = ", ".join(found)
    if not found:
        reasons = "".join(f"; {reason}" for reason in broken)
        raise WrongUsage(f"{repository} has no route: no model with backend {BACKEND}{reasons}")
    if name and name not in found:
        raise WrongUsage(f"{repository} has no route '{name}', it has: {known}")
    if not name and len(found) > 1:
        raise WrongUsage(f"{repository} has several routes, say which with --route: {known}")
    return _target(repository / (name or found[0]))


def find_routes(repository: Path) -> list[RouteLocation]:
    """Return all routes of a repository.

    Raises:
        InvalidConfig: the config of one does not say where its file lies.
    """
    return [_target(repository / name) for name in _route_names(repository)[0]]


def _target(folder: Path) -> RouteLocation:
    config = ModelConfig.from_file(folder, 1)
    return RouteLocation(config, Path(os.path.realpath(route_file.path_of(config))))


def _route_names(repository: Path) -> tuple[list[str], list[str]]:
    """Return the models that are routes, and why others cannot be read."""
    found, broken = [], []
    for path in sorted(repository.glob("*/config.pbtxt")):
        try:
            if read_pbtxt(path).get("backend") == BACKEND:
                found.append(path.parent.name)
        except (InvalidConfig, OSError) as error:  # another model's config must not hinder a change
            broken.append(str(error))
    return found, broken


def read_state(target: RouteLocation) -> RouteState:
    """Read a route's file and history as they are.

    Raises:
        InvalidConfig: there is something else than a file, or far too much.
        OSError: one cannot be read.
    """
    entries = history.read(target.history)
    try:
        text, status = route_file.read(target.path)
    except FileNotFoundError:
        return RouteState(target.path, None, entries, None)
    return RouteState(target.path, text, entries, history.unrecorded(entries, text, status))


def content(route: Route) -> Route:
    """Return what a route says, without the number of its change."""
    return replace(route, generation=0)


def check(target: RouteLocation, text: bytes) -> Table:
    """Read a route file's text as the server will.

    Raises:
        InvalidConfig: it is no route, or names what is not in the repository.
    """
    return route_file.read_table(target.config, text)


def describe(route: Route) -> str:
    """Say in one line which generation gives whom how much."""
    told = [f"{name} {percent(share)}" for name, share in shares(route).items()]
    return f"generation {route.generation}, {', '.join(told)}"


def percent(share: float) -> str:
    """Write a share of 0 to 1 in percent, to three decimals at most."""
    return f"{share * 100:.3f}".rstrip("0").rstrip(".") + " %"

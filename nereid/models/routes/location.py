"""Routes of a repository: their locations, files and histories.

A history records every content of its route file. Its lock also guards changes of that file.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from nereid.backends.routing import route_file
from nereid.backends.routing.assignment import LoadedRoute, Route, parse_route, shares
from nereid.base.config.model_config import ModelConfig, read_pbtxt
from nereid.base.errors import InvalidConfig, OperationFailed, WrongUsage
from nereid.base.journal import Journal, user_name
from nereid.repository.repository_index import ROUTE, output_names, pinned_models

FIRST_SEEN, BY_HAND = "first seen", "edited by hand"


class RouteChange(Struct, frozen=True):
    """One content of a route file, with its time, user, reason and SHA-256.

    `route` is JSON: the document, or a string with the file's text if the text is not JSON.
    """

    time: Annotated[datetime, Meta(tz=True)]
    user: str
    generation: int
    sha256: str
    note: str
    route: Raw

    @classmethod
    def of(cls, content: bytes, note: str, generation: int, time: datetime, user_id: int) -> "RouteChange":
        """Return the change to this content."""
        return cls(
            time, user_name(user_id), generation, sha256(content).hexdigest(), note, _document(content)
        )

    def parsed(self) -> Route | None:
        """Return the route, None if the content was invalid, as after an edit by hand."""
        try:
            return parse_route(bytes(self.route))
        except InvalidConfig:
            return None


@dataclass(frozen=True, slots=True)
class RouteLocation:
    """A route of a repository: its model's config, and the path of its file with links resolved."""

    config: ModelConfig
    path: Path

    @property
    def name(self) -> str:
        """Return the name of the route's model."""
        return self.config.name

    @property
    def repository(self) -> Path:
        """Return the folder of all models."""
        return self.config.folder.parent

    @property
    def history(self) -> Journal[RouteChange]:
        """Return the history of the file."""
        return Journal(self.path.with_suffix(".history.jsonl"), RouteChange, "nereid route")


@dataclass(frozen=True, slots=True)
class RouteFileSnapshot:
    """A route file as it is now: its content, None if the file is missing, and its history, oldest first.

    `unrecorded` is the entry that the history lacks for the current content.
    """

    path: Path
    content: bytes | None
    entries: tuple[RouteChange, ...]
    unrecorded: RouteChange | None

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file, empty if the file is missing."""
        return sha256(self.content).hexdigest() if self.content is not None else ""

    @property
    def all_entries(self) -> tuple[RouteChange, ...]:
        """Return the history including the current content."""
        return (*self.entries, self.unrecorded) if self.unrecorded else self.entries

    def route(self) -> Route:
        """Return the route.

        Raises:
            OperationFailed: the file is missing or invalid.
        """
        if self.content is None:
            raise OperationFailed(
                f"route file '{self.path}' is missing; fix: nereid route set --file FILE, or route revert"
            )
        try:
            return parse_route(self.content)
        except InvalidConfig as error:
            raise OperationFailed(
                f"invalid route file '{self.path}': {error}; fix: correct it, or nereid route revert"
            ) from None

    def differs_from(self, route: Route) -> bool:
        """Return whether the file has another route, apart from the generation."""
        try:
            return replace(self.route(), generation=0) != replace(route, generation=0)
        except OperationFailed:
            return True


def check_repository(repository: Path) -> None:
    """Raise `WrongUsage` unless a model repository is a folder."""
    if not repository.is_dir():
        raise WrongUsage(f"'{repository}' is not a folder; fix: name a model repository, or nereid init DIR")


def find_route(repository: Path, name: str = "") -> RouteLocation:
    """Return the route `name`, or the repository's only route.

    Raises:
        WrongUsage: the repository or route does not exist, or there are several routes.
        InvalidConfig: the route's config does not name a route file.
    """
    check_repository(repository)
    configs, broken = _configs(repository)
    names = [name for name, config in configs.items() if config.get("backend") == ROUTE]
    known = ", ".join(names)
    if not names:
        reasons = "".join(f"; {reason}" for reason in broken)
        raise WrongUsage(f"'{repository}' has no route: expected a model with backend {ROUTE}{reasons}")
    if name and name not in names:
        raise WrongUsage(f"'{repository}' has no route '{name}', it has: {known}")
    if not name and len(names) > 1:
        raise WrongUsage(f"'{repository}' has several routes; fix: name one with --model: {known}")
    return _location(repository / (name or names[0]))


def find_routes(repository: Path) -> list[RouteLocation]:
    """Return all routes of a repository.

    Raises:
        InvalidConfig: the config of a route does not name a route file.
    """
    configs, _ = _configs(repository)
    return [
        _location(repository / name) for name, config in configs.items() if config.get("backend") == ROUTE
    ]


def readable_routes(repository: Path) -> dict[str, Route]:
    """Return the routes whose files can be read; `nereid check` gives the reasons for the others."""
    routes, (configs, _) = dict[str, Route](), _configs(repository)
    for name, config in configs.items():
        if config.get("backend") == ROUTE:
            with contextlib.suppress(OperationFailed, InvalidConfig, OSError):
                routes[name] = read_route_file(_location(repository / name)).route()
    return routes


def models_with(repository: Path, outputs: Sequence[str]) -> list[str]:
    """Return the models with a task's outputs: its routes or, if it has none, all that take an `image`."""
    configs, _ = _configs(repository)
    models = [name for name, config in configs.items() if {*outputs} <= output_names(config)]
    return [name for name in models if configs[name].get("backend") == ROUTE] or models


def preprocessing_of(repository: Path, model: str) -> ModelConfig | None:
    """Return the config of the preprocessing behind a pinned model; None if that is not known."""
    for pin in pinned_models(repository):
        if pin.model == model and pin.preprocess:
            return ModelConfig.from_file(repository / pin.preprocess, pin.preprocess_version)
    return None


def _location(folder: Path) -> RouteLocation:
    config = ModelConfig.from_file(folder, 1)
    return RouteLocation(config, Path(os.path.realpath(route_file.path_of(config))))


def _configs(repository: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the models' configs, and why others cannot be read, which must not prevent a change of these."""
    configs, broken = dict[str, dict[str, Any]](), list[str]()
    for path in sorted(repository.glob("*/config.pbtxt")):
        try:
            configs[path.parent.name] = read_pbtxt(path)
        except (InvalidConfig, OSError) as error:
            broken.append(str(error))
    return configs, broken


def read_route_file(location: RouteLocation) -> RouteFileSnapshot:
    """Read a route's file and history.

    Raises:
        InvalidConfig: the path is not a regular file, or the file is too large.
        OSError: the file or history cannot be read.
    """
    entries = location.history.read_intact()
    try:
        content, stat_result = route_file.read(location.path)
    except FileNotFoundError:
        return RouteFileSnapshot(location.path, None, entries, None)
    return RouteFileSnapshot(location.path, content, entries, _unrecorded(entries, content, stat_result))


def _unrecorded(
    entries: Sequence[RouteChange], content: bytes, stat_result: os.stat_result
) -> RouteChange | None:
    """Return the change that the history lacks for the file's content; None if the last entry has it.

    The owner and time in the file's `stat_result` are used for the change.
    """
    if entries and entries[-1].sha256 == sha256(content).hexdigest():
        return None
    try:
        generation = parse_route(content).generation
    except InvalidConfig:
        generation = entries[-1].generation if entries else 0
    time = datetime.fromtimestamp(stat_result.st_mtime, UTC)
    return RouteChange.of(content, BY_HAND if entries else FIRST_SEEN, generation, time, stat_result.st_uid)


def _document(content: bytes) -> Raw:
    try:
        return Raw(msgspec.json.encode(msgspec.json.decode(content)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Raw(msgspec.json.encode(content.decode(errors="replace")))


def load_current_route(location: RouteLocation, current: RouteFileSnapshot) -> LoadedRoute:
    """Parse the current route file as the server does.

    Raises:
        OperationFailed, InvalidConfig: it is missing or invalid, or names models that do not exist.
    """
    current.route()  # names the file and the fix if it is invalid
    return route_file.load_route(location.config, current.content or b"")


def describe(route: Route) -> str:
    """Return the generation and the variants' shares as one line."""
    parts = [f"{name} {percent(share)}" for name, share in shares(route).items()]
    return f"generation {route.generation}, {', '.join(parts)}"


def percent(share: float) -> str:
    """Format a share of 0 to 1 in percent, with at most three decimals."""
    return f"{share * 100:.3f}".rstrip("0").rstrip(".") + " %"

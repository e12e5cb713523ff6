"""Removal of a public name with all its models, and the reload of a model whose files were edited."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from nereid.config.model_config import read_pbtxt
from nereid.errors import OperationFailed, WrongUsage
from nereid.publish.engine.actions import Action, Install, Workspace
from nereid.publish.engine.engine import begin, locked_repository, undo
from nereid.publish.engine.journal import Journal
from nereid.repository.check import check
from nereid.repository.layout import config_files, model_folders, pins, readable_configs, steps_of
from nereid.routes.target import check_repository, find_routes, read_state
from nereid.routing.assignment import Route
from nereid.server.control import Control, Refused
from nereid.server.run_dir import ServerRecord
from nereid.serving_errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Parts:
    """The models behind a public name, in the order of their loading, and the files of its route."""

    models: tuple[str, ...]
    files: tuple[str, ...] = ()


def remove(
    repository: Path,
    name: str,
    record: ServerRecord | None,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[str, ...]:
    """Remove a model; with a route, also the models that only its requests reach. Returns their names.

    Running requests end first. A model whose folder was deleted by hand is unloaded.

    Raises:
        WrongUsage: the model does not exist, or another model or route needs one of those.
        OperationFailed: the server refuses; the next command continues.
        OSError: a file cannot be moved.
    """
    check_repository(repository)
    with locked_repository(repository, record, report) as (log, unstaged):
        parts = find_parts(repository, name)
        if not parts.models:
            return _unload_leftover(repository, name, record)
        remove_parts(log, unstaged, name, parts)
        return parts.models


def remove_parts(log: Journal, unstaged: Workspace, name: str, parts: Parts) -> None:
    """Remove models under the lock of the repository; errors as `remove`."""
    *behind, last = parts.models
    actions: tuple[Action, ...] = (
        *(Install(model, model) for model in behind),
        *(Install(file) for file in parts.files),
        Install(last, last),
    )
    operation, workspace = begin(log, unstaged, "remove", name, 0)
    operation = replace(operation, actions=actions)
    log.write("undo", operation)
    undo(log, operation, workspace)


def find_parts(repository: Path, name: str) -> Parts:
    """Return the models behind a name; none if the repository does not have it.

    Raises:
        WrongUsage: another model or route needs one of them.
    """
    folders = {path.name for path in model_folders(repository)}
    if name not in folders:
        return Parts(())
    routes = {location.name: read_state(location).route() for location in find_routes(repository)}
    if name not in routes:
        parts = Parts((name,))
    else:
        all_pins = pins(repository, readable_configs(repository))
        called = {each.model for each in routes[name].targets()}
        networks = {pin.network for pin in all_pins if pin.model in called}
        behind = [pin for pin in all_pins if pin.network in networks]
        preprocesses = {pin.preprocess for pin in behind if pin.preprocess}
        pinned = {pin.model for pin in behind} | called
        ordered = [*sorted(networks), *sorted(preprocesses), *sorted(pinned - networks), name]
        files = [f"{name}.route.json", f"{name}.route.history.jsonl"]
        there = tuple(each for each in files if (repository / each).exists())
        parts = Parts(tuple(each for each in ordered if each in folders), there)
    if user := _user(repository, parts.models, routes):
        raise WrongUsage(f"cannot remove '{name}': {user}; fix: remove or change that first")
    return parts


def _user(repository: Path, models: tuple[str, ...], routes: Mapping[str, Route]) -> str:
    """Return a model or route outside that needs one of the models; empty if there is none."""
    for path in model_folders(repository):
        if path.name not in models:
            for file in config_files(path):
                for step in _steps(file):
                    if step in models:
                        return f"model '{path.name}' runs '{step}'"
    for name, route in routes.items():
        for each in route.targets():
            if name not in models and each.model in models:
                return f"route '{name}' sends requests to '{each.model}'"
    return ""


def _steps(file: Path) -> list[str]:
    """Return the models that a config runs; none if it cannot be read, because no server loads it."""
    try:
        return [step for step, _ in steps_of(read_pbtxt(file))]
    except InvalidConfig:
        return []


def _unload_leftover(repository: Path, name: str, record: ServerRecord | None) -> tuple[str, ...]:
    control = Control(record) if record else None
    if control is None or not _is_loaded(control, name):
        known = ", ".join(sorted(path.name for path in model_folders(repository))) or "none"
        raise WrongUsage(f"'{repository}' has no model '{name}', it has: {known}")
    control.unload(name)
    return (name,)


def _is_loaded(control: Control, name: str) -> bool:
    """Return whether the server has a model; its index lists only models that have a folder."""
    try:
        control.config(name)
    except Refused:
        return False
    return True


def reload(repository: Path, name: str, record: ServerRecord) -> None:
    """Load a model again whose config or files were edited, after the checks of `nereid check`.

    Raises:
        WrongUsage: the model does not exist.
        OperationFailed: a check of the model fails, or the server refuses; the loaded model stays.
    """
    check_repository(repository)
    known = sorted(path.name for path in model_folders(repository))
    if name not in known:
        raise WrongUsage(f"'{repository}' has no model '{name}', it has: {', '.join(known) or 'none'}")
    failures = [each for each in check(repository) if each.verdict == "fail" and each.model == name]
    if failures:
        raise OperationFailed("; ".join(f"{each.what}: {each.found}" for each in failures))
    Control(record).load(name)

"""Remove a public name with all its models, and reload a model whose files were edited."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid.backends.routing.assignment import Route
from nereid.base.config.model_config import read_pbtxt
from nereid.base.errors import InvalidConfig, OperationFailed, WrongUsage
from nereid.models.publish.actions import Action, Install
from nereid.models.publish.network import successor
from nereid.models.publish.transaction import locked_repository
from nereid.models.rollout.rollout_journal import check_none_active
from nereid.models.routes.location import check_repository, find_routes, read_route_file
from nereid.repository import check
from nereid.repository.repository_index import (
    PinnedModel,
    config_files,
    model_folders,
    pinned_models,
    steps_of,
)
from nereid.server.model_control import ModelControl, Refused
from nereid.server.run_dir import ServerInfo


@dataclass(frozen=True, slots=True)
class RemovableModels:
    """The models behind a public name, in load order, and the files of its route."""

    models: tuple[str, ...]
    files: tuple[str, ...] = ()


def remove(
    repository: Path,
    name: str,
    server_info: ServerInfo | None,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[str, ...]:
    """Remove a model; with a route, also the models that only its requests reach. Returns their names.

    Running requests finish first. A model whose folder was deleted by hand is unloaded.

    Raises:
        WrongUsage: the model does not exist, or another model or route needs one of them.
        OperationFailed: the server refuses, and the next command continues; or a rollout has not ended.
        OSError: a file cannot be moved.
    """
    check_repository(repository)
    with locked_repository(repository, server_info, report) as locked:
        check_none_active(repository, f"remove '{name}'", name)
        parts = find_parts(repository, name)
        if not parts.models:
            _unload_leftover(repository, name, server_info)
            return (name,)
        *behind, last = parts.models
        actions: tuple[Action, ...] = (
            *(Install(model, model) for model in behind),
            *(Install(file) for file in parts.files),
            Install(last, last),
        )
        locked.undo_earlier("remove", name, 0, actions)
        return parts.models


def find_parts(repository: Path, name: str) -> RemovableModels:
    """Return the models behind a name; none if the repository does not have it.

    Models that others also run, such as the networks that find text, are left out.

    Raises:
        WrongUsage: another model or route needs a pinned model of this name, or the model itself.
    """
    folders = {path.name for path in model_folders(repository)}
    if name not in folders:
        return RemovableModels(())
    routes = {location.name: read_route_file(location).route() for location in find_routes(repository)}
    outer = _pinned(repository, name, routes) if name in routes else (name,)
    if user := _user(repository, outer, routes):
        raise WrongUsage(f"cannot remove '{name}': {user}; fix: remove or change that first")
    if name not in routes:
        return RemovableModels(outer)
    inner = [model for model in _inner(repository, outer) if not _user(repository, (*outer, model), routes)]
    files = [f"{name}.route.json", f"{name}.route.history.jsonl"]
    there = tuple(file for file in files if (repository / file).exists())
    return RemovableModels(tuple(model for model in (*inner, *outer) if model in folders), there)


def _pinned(repository: Path, name: str, routes: Mapping[str, Route]) -> tuple[str, ...]:
    """Return the pinned models of all versions behind this route and no other, and the route."""
    called = {target.model for target in routes[name].targets()}
    other_models = {
        target.model for other, route in routes.items() if other != name for target in route.targets()
    }
    all_pins = pinned_models(repository)
    called_pins = [pin for pin in all_pins if pin.model in called]
    versions = {
        pin.model for pin in all_pins if any(_is_version(pin, origin) for origin in called_pins)
    } - other_models
    return (*sorted((versions | called) - {pin.network for pin in called_pins}), name)


def _is_version(pin: PinnedModel, known: PinnedModel) -> bool:
    """Return whether publishing makes this pinned model from a known one; others may also run its network."""
    name = successor(known.model, known.network_version, pin.network_version)
    return pin.network == known.network and pin.model == name


def _inner(repository: Path, pinned: Collection[str]) -> list[str]:
    """Return the models that pinned models run, in load order."""
    selected_pins = [pin for pin in pinned_models(repository) if pin.model in pinned]
    roles = [{getattr(pin, role) for pin in selected_pins} for role in ("network", "preprocess", "after")]
    role_models = [name for role in roles for name in sorted(role)]
    steps = {step for name in pinned for file in config_files(repository / name) for step in _steps(file)}
    return [name for name in (*sorted(steps.difference(role_models)), *role_models) if name not in pinned]


def _user(repository: Path, models: tuple[str, ...], routes: Mapping[str, Route]) -> str:
    """Return a model or route outside that needs one of the models; empty if there is none."""
    for path in model_folders(repository):
        if path.name not in models:
            for file in config_files(path):
                for step in _steps(file):
                    if step in models:
                        return f"model '{path.name}' runs '{step}'"
    for name, route in routes.items():
        for target in route.targets():
            if name not in models and target.model in models:
                return f"route '{name}' sends requests to '{target.model}'"
    return ""


def _steps(file: Path) -> list[str]:
    """Return the models that a config runs; none if it cannot be read, because no server loads it."""
    try:
        return [step for step, _ in steps_of(read_pbtxt(file))]
    except InvalidConfig:
        return []


def _unload_leftover(repository: Path, name: str, server_info: ServerInfo | None) -> None:
    """Unload a model without a folder; WrongUsage if no server has loaded it."""
    if model_control := ModelControl(server_info) if server_info else None:
        try:
            model_control.config(name)  # the server's index lists only models that have a folder
        except Refused:
            pass
        else:
            model_control.unload(name)
            return
    _check_there(repository, name)


def _check_there(repository: Path, name: str) -> None:
    known = sorted(path.name for path in model_folders(repository))
    if name not in known:
        raise WrongUsage(f"'{repository}' has no model '{name}', it has: {', '.join(known) or 'none'}")


def reload(repository: Path, name: str, server_info: ServerInfo) -> None:
    """Reload a model whose config or files were edited, after the checks of `nereid check`.

    Raises:
        WrongUsage: the model does not exist.
        OperationFailed: a check of the model fails, or the server refuses; the loaded model stays.
    """
    check_repository(repository)
    _check_there(repository, name)
    failures = [
        failure for failure in check.check(repository) if failure.verdict == "fail" and failure.model == name
    ]
    if failures:
        raise OperationFailed("; ".join(f"{failure.what}: {failure.found}" for failure in failures))
    ModelControl(server_info).load(name)

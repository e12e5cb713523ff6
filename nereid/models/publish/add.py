"""Addition of an ONNX file under a public name: network, preprocessing, last step, pinned model and route."""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace as with_fields

from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish.configs import Names
from nereid.models.publish.engine.actions import Action, AddVariant, Install, Load, Warm
from nereid.models.publish.engine.engine import commit, locked_repository, preparation
from nereid.models.publish.pinned import write_on_cpu
from nereid.models.publish.publisher import Published
from nereid.models.publish.remove import find_parts, remove_parts
from nereid.models.publish.staged_addition import PROFILES, AddRequest, Proposal, Staging
from nereid.models.rollout.rollout_journal import check_none_active
from nereid.models.routes.target import check_repository, find_route, read_state
from nereid.server.run_dir import ServerRecord
from nereid.vision.imaging.preprocess_settings import PRESETS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,50}")


class Declined(OperationFailed):
    """The proposal was not accepted; nothing has changed."""


def accept(proposal: Proposal) -> bool:
    """Accept any proposal."""
    return True


def add(
    repository: Path,
    request: AddRequest,
    record: ServerRecord | None,
    report: Callable[[str], None] = lambda line: None,
    confirm: Callable[[Proposal], bool] = accept,
) -> Published:
    """Write network, preprocessing, last step, pinned model and route for an ONNX file, and load them.

    If it is killed, the next command that changes the repository finishes or undoes the addition.

    Args:
        repository: the model repository; created if it does not exist.
        request: the file and its properties.
        record: the running server, if there is one.
        report: receives a line per step.
        confirm: decides about the examined network, before anything has changed.

    Raises:
        WrongUsage: the request does not fit the file, or the name is taken.
        Declined: `confirm` returned false.
        OperationFailed: the network is rejected, or the server refuses a model, and nothing has changed.
        OSError: a file cannot be read or written.
    """
    start = time.monotonic()
    _check_request(repository, request)
    repository.mkdir(parents=True, exist_ok=True)
    with locked_repository(repository, record, report) as (log, unstaged):
        names = Names.for_route(request.name)
        with preparation(log, unstaged, "add", request.name, 1) as (operation, workspace):
            old = find_parts(repository, request.name) if request.is_replacing else None
            if not old:
                # A reader has no preprocess model, so that one is checked when it is certain to be written.
                _check_free(workspace.repository, (names.route, names.pinned, names.network), names.route)
            proposal = Staging(request, names, workspace).stage(operation.user)
            if not old:
                _check_free(workspace.repository, proposal.models, names.route)
            if not confirm(proposal):
                raise Declined(f"'{request.name}' was not added")
        if old and old.models:
            # The old models are removed only now, as the new ones were examined and accepted.
            remove_parts(log, unstaged, request.name, old.without(proposal.shared))
        commit(log, with_fields(operation, actions=_actions(proposal.models, names)), workspace)
        return Published(names.network, 1, (names.pinned,), proposal.report, time.monotonic() - start)


def add_cpu_fallback(
    repository: Path,
    route: str,
    record: ServerRecord | None,
    report: Callable[[str], None] = lambda line: None,
) -> str:
    """Copy the pinned model of a route's default variant to the CPU, as the route's first fallback.

    The copy keeps the versions of its parts. Returns its name.

    Raises:
        WrongUsage: the route or its model does not fit.
        OperationFailed: the model cannot be copied, or the server refuses it, and nothing has changed.
        OSError: a file cannot be read or written.
    """
    check_repository(repository)
    with locked_repository(repository, record, report) as (log, unstaged):
        location = find_route(repository, route)
        check_none_active(repository, f"change the fallbacks of '{location.name}'")
        default = read_state(location).route().replacements[0]
        name, variant = f"{default.model}_cpu", f"{default.name}_cpu"
        if (repository / name).exists():
            raise WrongUsage(
                f"'{repository}' already has a model '{name}'; fix: nereid route fallback {variant}"
            )
        with preparation(log, unstaged, "add", name, 1) as (operation, workspace):
            write_on_cpu(repository / default.model, workspace.staging / "new" / name)
        actions: tuple[Action, ...] = (
            Install(name, name),
            Load(name, 1),
            Warm(name, 1),
            AddVariant(location.name, variant, name, 0, is_fallback=True),
        )
        commit(log, with_fields(operation, actions=actions), workspace)
        return name


def _check_request(repository: Path, request: AddRequest) -> None:
    if not NAME.fullmatch(request.name):
        raise WrongUsage(
            f"invalid name: expected at most 51 letters, digits, '.', '_' and '-', got '{request.name}'"
        )
    if (preset := request.parameters.get("preset", "")) and preset not in PRESETS:
        raise WrongUsage(f"invalid preset: expected one of {', '.join(PRESETS)}, got '{preset}'")
    if unknown := [each for each in request.profiles if each not in PROFILES]:
        raise WrongUsage(f"invalid profile: expected one of {', '.join(PROFILES)}, got '{unknown[0]}'")
    for path, what in [(request.labels, "label file"), *((image, "image") for image in request.images)]:
        if path and not path.is_file():
            raise WrongUsage(f"{what} '{path}' does not exist")
    if repository.exists() and not repository.is_dir():
        raise WrongUsage(f"'{repository}' is not a folder; fix: name a model repository, or nereid init DIR")


def _check_free(repository: Path, models: Sequence[str], public: str) -> None:
    for name in models:
        if (repository / name).exists():
            raise WrongUsage(
                f"'{repository}' already has a model '{name}'; "
                f"fix: nereid publish {public} for a new version, another --name, or --replace"
            )
    route = repository / f"{public}.route.json"
    if route.exists():
        raise WrongUsage(
            f"'{repository}' already has a file '{route.name}'; fix: move the file away, or another --name"
        )


def _actions(behind: Sequence[str], names: Names) -> tuple[Action, ...]:
    """Return the actions in an order in which a server that starts meanwhile can load every model."""
    return (
        *(Install(name, name) for name in behind),
        Install(f"{names.route}.route.json"),
        *(Load(name, 1) for name in behind),
        Warm(names.pinned, 1),
        Install(names.route, names.route),
        Load(names.route, 1),
        Warm(names.route, 1),
    )

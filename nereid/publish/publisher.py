"""Versions of a network: published, rolled back and retired, while a server goes on answering.

A version is staged beside the repository, examined in a process of its own, and only then moved in, loaded,
asked in every batch size, and given to the routes. What is done is in the journal before it is done.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from nereid.assets import SAMPLES
from nereid.config.model_config import read_pbtxt
from nereid.errors import OperationFailed, WrongUsage
from nereid.publish import candidate, pinned
from nereid.publish.engine.actions import Action, AddVariant, Install, Load, Policy, Warm, Workspace
from nereid.publish.engine.engine import begin, commit, locked_repository, undo
from nereid.publish.engine.journal import Journal, Operation
from nereid.publish.engine.variants import Propose, rolled_back
from nereid.publish.examination.examine import ExaminationRequest, Report, examine
from nereid.publish.network import Network, find_network
from nereid.repository.layout import config_files, steps_of, versions_there
from nereid.routes.change import change_with_retry
from nereid.routes.served import RunningServer
from nereid.routes.target import RouteLocation, find_routes, read_state
from nereid.routing.assignment import MAX_VARIANTS, MAX_WEIGHT
from nereid.server.control import NotReached
from nereid.server.run_dir import ServerRecord

ROLLBACK_S = 30.0


class RouteFull(OperationFailed):
    """A route has as many variants as it can have; older ones must be retired first."""


@dataclass(frozen=True, slots=True)
class Gates:
    """What a new version must keep to, against the current one.

    Args:
        images: what both are shown.
        tolerance: how far outputs may differ, relative to the largest one of the current version.
        is_change_accepted: whether they may differ as they like.
        max_slowdown, max_memory_ratio: how many times its time per image, and its memory, it may take.
        against: the version to compare with; 0 for the one behind a route's default variant.
    """

    images: tuple[Path, ...] = SAMPLES
    tolerance: float = 0.05
    is_change_accepted: bool = False
    max_slowdown: float = 1.5
    max_memory_ratio: float = 1.5
    against: int = 0


@dataclass(frozen=True, slots=True)
class Published:
    """A version that is served now: of which network, behind which pinned models, and what was measured."""

    model: str
    version: int
    pinned: tuple[str, ...]
    report: Report
    seconds: float


def publish(
    repository: Path,
    name: str,
    source: Path,
    record: ServerRecord | None,
    gates: Gates | None = None,
    weight: float = 0,
    report: Callable[[str], None] = lambda line: None,
) -> Published:
    """Make a network's next version of an ONNX file: examined, loaded, and behind a variant of its routes.

    Killed at any point, the next command that changes the repository finishes it, or undoes it.

    Args:
        repository: where the model is.
        name: of the network, or of a route or pinned model that has only this one.
        source: the ONNX file, or a folder with it and its external data.
        record: of the running server, if there is one.
        gates: what it is held to.
        weight: what its variant gets at once; 0 is for callers that ask for it by name.
        report: gets a line for everything that was done.

    Raises:
        WrongUsage: there is no such model or file.
        OperationFailed: it is rejected, or the server refuses it: nothing changed. `NotReached`: the server
            is gone, and the next command goes on.
        OSError: a file cannot be read or written.
    """
    start = time.monotonic()
    if not 0 <= weight <= MAX_WEIGHT:
        raise WrongUsage(f"a weight is 0 to {MAX_WEIGHT:g}, got {weight:g}")
    with locked_repository(repository, record, report) as (log, at):
        network, gates = find_network(repository, name), gates or Gates()
        current = _current(network, gates.against)
        operation, site = begin(log, at, "publish", network.name, _next_version(log, network))
        try:
            measured, actions = _prepare(operation, network, current, source, gates, weight, site)
        except BaseException as error:
            log.write("undone", operation, str(error))
            raise
        commit(log, replace(operation, actions=actions), site)
        models = tuple(each.model for each in actions if isinstance(each, Install) and not each.version)
        return Published(network.name, operation.version, models, measured, time.monotonic() - start)


def retire(
    repository: Path,
    name: str,
    version: int,
    record: ServerRecord | None,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Take a version away: out of the routes, then out of the server once it is idle, then from the disk.

    Raises:
        WrongUsage: there is no such version, or requests still go to it.
        OperationFailed: the server does not do it; the next command goes on.
        OSError: a file cannot be read or written.
    """
    with locked_repository(repository, record, report) as (log, at):
        network = find_network(repository, name)
        _check_retirable(repository, network, version)
        gone = network.of(version)
        actions: tuple[Action, ...] = (
            Install(f"{network.name}/{version}", network.name, version),
            Policy(network.name, version),
            *(Install(pin.model, pin.model) for pin in gone.pins),
            *(AddVariant(b.route, b.variant.name, b.variant.model, b.variant.weight) for b in gone.branches),
        )
        operation, site = begin(log, at, "retire", network.name, version)
        operation = replace(operation, actions=actions)
        log.write("undo", operation)
        undo(log, operation, site)


def rollback(repository: Path, name: str, record: ServerRecord | None) -> list[str]:
    """Take all traffic from the newest version that has any, and give it to those that had it before.

    It waits for nobody who is publishing, and the version stays loaded. Returns what was done, by route.

    Raises:
        WrongUsage: no route has the network, or no earlier version of it.
        OperationFailed, InvalidConfig: a route cannot be changed.
    """
    network = find_network(repository, name)
    used = {each.pin.network_version for each in network.branches if each.variant.weight}
    if not used:
        raise WrongUsage(f"no route sends anything to '{network.name}': its callers name versions themselves")
    newest = max(used)
    routes = {each.route for each in network.of(newest).branches if each.variant.weight}
    found = [
        (target, _way_back(target, network, newest))
        for target in find_routes(repository)
        if target.name in routes
    ]
    return [_roll_back(target, propose, record) for target, propose in found]


def _roll_back(target: RouteLocation, propose: Propose, record: ServerRecord | None) -> str:
    """Change a route; a server that does not answer finds the change when it is back."""
    try:
        server = RunningServer(record) if record else None
        return change_with_retry(target, propose, server, ROLLBACK_S)
    except NotReached as error:
        return f"{change_with_retry(target, propose, None)}: {error}"


def _way_back(target: RouteLocation, network: Network, newest: int) -> Propose:
    """Return the change that takes a route back from a version.

    Raises:
        WrongUsage: there is no earlier version.
    """
    branches = [each for each in network.branches if each.route == target.name]
    current = [b.variant.name for b in branches if b.pin.network_version == newest]
    earlier = sorted(
        (b for b in branches if b.pin.network_version < newest), key=lambda b: -b.pin.network_version
    )
    if not earlier:
        raise WrongUsage(f"route '{target.name}' has no version of '{network.name}' before {newest}")
    return rolled_back(tuple(current), tuple(each.variant.name for each in earlier))


def _prepare(
    operation: Operation,
    network: Network,
    current: int,
    source: Path,
    gates: Gates,
    weight: float,
    site: Workspace,
) -> tuple[Report, tuple[Action, ...]]:
    """Stage and examine a version; returns what was measured, and what is to be done with it."""
    config, version = network.config(operation.version), operation.version
    models, variants = _successors(network, current, version, weight, site)
    staged = site.staging / "new" / network.name / str(version)
    candidate.check_labels(source, network.folder)
    candidate.stage(source, staged, config.document.get("default_model_filename") or "model.onnx")
    site.report(f"{source.name}: staged as version {version} of {network.name}")
    measured = examine(_question(network, current, staged, gates, site), progress=site.report)
    candidate.write_checksums(staged, source, operation.user)
    for template, model in models.items():
        pin = next(pin for pin in network.pins if pin.model == template)
        pinned.write_like(site.repository / template, pin, version, site.staging / "new" / model)
    ready = [action for model in models.values() for action in (Load(model, 1), Warm(model, 1))]
    return measured, (
        Install(f"{network.name}/{version}", network.name, version),
        Policy(network.name, version),
        Load(network.name, version),
        *([] if models else [Warm(network.name, version)]),
        *(Install(model, model) for model in models.values()),
        *ready,
        *variants,
    )


def _successors(
    network: Network, current: int, version: int, weight: float, site: Workspace
) -> tuple[dict[str, str], list[AddVariant]]:
    """Return what the pinned models of a new version are called, by their templates, and its variants."""
    now = network.of(current)
    # One variant of each route, and its default rather than another.
    chosen = {b.route: b for b in sorted(now.branches, key=lambda b: b.is_default)}
    templates = [b.pin.model for b in chosen.values()] or [pin.model for pin in now.pins[:1]]
    models = {name: pinned.successor(name, current, version) for name in templates}
    for model in models.values():
        if (site.repository / model).exists():
            raise OperationFailed(
                f"model '{model}' is there already, which is to be that of version {version}"
            )
    routes = {target.name: read_state(target).route() for target in find_routes(site.repository)}
    variants = []
    for branch in chosen.values():
        name = pinned.successor(branch.variant.name, current, version)
        names = [variant.name for variant in routes[branch.route].variants]
        if len(names) >= MAX_VARIANTS:
            raise RouteFull(
                f"route '{branch.route}' has {len(names)} variants, which is all it can have: "
                f"{', '.join(names)}; fix: nereid retire old versions"
            )
        if name in names:
            raise OperationFailed(f"route '{branch.route}' has a variant '{name}' already")
        variants.append(AddVariant(branch.route, name, models[branch.pin.model], weight))
    return models, variants


def _question(
    network: Network, current: int, staged: Path, gates: Gates, site: Workspace
) -> ExaminationRequest:
    pin = next(iter(network.of(current).pins), None)
    config = network.config(current)
    labels = [output.get("label_filename") for output in config.document.get("output", ())]
    return ExaminationRequest(
        model=network.name,
        candidate=staged,
        document=config.document,
        current=network.folder / str(current),
        preprocess=site.repository / pin.preprocess if pin and pin.preprocess else None,
        preprocess_version=pin.preprocess_version if pin else 0,
        images=gates.images,
        tolerance=gates.tolerance,
        accept_change=gates.is_change_accepted,
        max_slowdown=gates.max_slowdown,
        max_memory_ratio=gates.max_memory_ratio,
        labels=next((network.folder / name for name in labels if name), None),
    )


def _current(network: Network, against: int) -> int:
    """Return the version that a new one is compared with.

    Raises:
        WrongUsage: it is not served.
    """
    served = network.served()
    default = [b.pin.network_version for b in network.branches if b.is_default]
    current = against or next(iter(default), served[-1] if served else 0)
    if current not in served:
        known = ", ".join(map(str, served)) or "none"
        raise WrongUsage(f"version {current} of '{network.name}' is not served, these are: {known}")
    return current


def _next_version(log: Journal, network: Network) -> int:
    """Return the number of the next version: never one that was used before."""
    used = [
        line.operation.version
        for line in log.lines()
        if line.operation.model == network.name and line.event in ("commit", "undo")
    ]
    return max([*used, *versions_there(network.folder)], default=0) + 1


def _check_retirable(repository: Path, network: Network, version: int) -> None:
    served = network.served()
    if version not in versions_there(network.folder):
        known = ", ".join(map(str, versions_there(network.folder)))
        raise WrongUsage(f"'{network.name}' has no version {version}, it has: {known}")
    if served == [version]:
        raise WrongUsage(f"version {version} is the only one of '{network.name}' that is served")
    gone = network.of(version)
    for branch in gone.branches:
        name, route = branch.variant.name, branch.route
        if branch.variant.weight:
            raise WrongUsage(
                f"variant '{name}' of route '{route}' has weight {branch.variant.weight:g}; "
                f"fix: nereid route set {name}=0, or nereid rollback {network.name}"
            )
        if branch.is_default:
            raise WrongUsage(f"variant '{name}' is the default of route '{route}'; fix: make it another one")
        if branch.variant.headers:
            raise WrongUsage(f"header rules of route '{route}' lead to variant '{name}'; fix: take them away")
    if user := next(_users(repository, network.name, version, {pin.model for pin in gone.pins}), None):
        raise WrongUsage(f"{user} calls version {version} of '{network.name}'; fix: change or remove it")


def _users(repository: Path, network: str, version: int, pinned_models: set[str]) -> Iterator[str]:
    """Name what would call a version, or a pinned model of it, once those of its variants are gone."""
    for path in sorted(repository.glob("*/config.pbtxt")):
        for file in config_files(path.parent):
            is_step = (network, version) in steps_of(read_pbtxt(file))
            if path.parent.name not in pinned_models and is_step:
                yield f"model '{path.parent.name}'"
    for target in find_routes(repository):
        route = read_state(target).route()
        for each in route.targets():
            is_shadow = each in route.shadows and each.model in pinned_models
            if is_shadow or (each.model, each.version) == (network, version):
                yield f"'{each.name}' of route '{target.name}'"

"""Publication, rollback and retirement of a network's versions while a server continues to respond.

A version is staged next to the repository and examined in a separate process. An accepted version is moved
into the repository, loaded, warmed up, and added to the routes. Every change is first written to the journal.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from nereid.backends.routing.assignment import MAX_VARIANTS
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish import candidate, pinned
from nereid.models.publish.engine.actions import Action, AddVariant, Install, Load, Policy, Warm, Workspace
from nereid.models.publish.engine.engine import commit, locked_repository, preparation, take_out
from nereid.models.publish.engine.operation_journal import Operation, OperationJournal
from nereid.models.publish.engine.variants import rolled_back
from nereid.models.publish.examination.examine import Gates, Report, examine
from nereid.models.publish.intake import precision as conversion
from nereid.models.publish.intake.precision import Precision
from nereid.models.publish.intake.successor import adapt_successor
from nereid.models.publish.network import Network, check_retirable, find_network
from nereid.models.rollout.rollout_journal import check_none_active
from nereid.models.routes.change import Propose, RunningServer, change_with_retry
from nereid.models.routes.target import RouteLocation, find_routes, read_state
from nereid.repository import onnx_file
from nereid.repository.layout import versions_there
from nereid.server.control import NotReached
from nereid.server.run_dir import ServerRecord

ROLLBACK_S = 30.0
# A version that gets all traffic is a change of the route, not of the repository.
MAX_SHARE = 0.99


class RouteFull(OperationFailed):
    """A route has the maximum number of variants; older ones must be retired first."""


@dataclass(frozen=True, slots=True)
class Published:
    """A served version: its network, the pinned models in front of it, and its measurements."""

    model: str
    version: int
    pinned: tuple[str, ...]
    report: Report
    seconds: float

    def line(self, record: ServerRecord | None) -> str:
        """Return what has happened, for a person; `record` is the running server."""
        behind = f" as {', '.join(self.pinned)}" if self.pinned else ""
        return f"{self.model} {self.version}: {served(record)}{behind}, after {self.seconds:.1f} s"


def served(record: ServerRecord | None) -> str:
    """Return whether a server serves a change already."""
    return "served" if record else "in the repository (no server runs)"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A network to publish: its file or folder, and the conditions of its publication."""

    source: Path
    gates: Gates
    share: float
    precision: Precision | None


def publish(
    repository: Path,
    name: str,
    source: Path,
    record: ServerRecord | None,
    gates: Gates | None = None,
    share: float = 0,
    report: Callable[[str], None] = lambda line: None,
    precision: Precision | None = None,
) -> Published:
    """Make an ONNX file the next version of a network: examined, loaded, and a variant of its routes.

    If it is killed, the next command that changes the repository finishes or undoes the publication.

    Args:
        repository: the model repository.
        name: the network, or a route or pinned model with this network only.
        source: the ONNX file, or a folder with it and its external data.
        record: the running server, if there is one.
        gates: limits of the examination.
        share: initial part of the traffic, 0 to below 1; 0 serves the version only on request.
        report: receives a line per step.
        precision: datatype to which the network is converted; None leaves it as it is.

    Raises:
        WrongUsage: the model or file does not exist.
        OperationFailed: the examination or the server rejects it, and nothing has changed. `NotReached`: the
            server has gone away, and the next command continues.
        OSError: a file cannot be read or written.
    """
    start = time.monotonic()
    check_share(share)
    with locked_repository(repository, record, report) as (log, unstaged):
        check_none_active(repository, f"publish a version of '{name}'")
        network, gates = find_network(repository, name), gates or Gates()
        current = _current(network, gates.against)
        number = _next_version(log, network)
        with preparation(log, unstaged, "publish", network.name, number) as (operation, workspace):
            given = Candidate(source, gates, share, precision)
            measured, actions = _prepare(operation, network, current, given, workspace)
            check_none_active(repository, f"publish a version of '{name}'")  # the examination takes time
        commit(log, replace(operation, actions=actions), workspace)
        models = tuple(each.model for each in actions if isinstance(each, Install) and not each.version)
        return Published(network.name, operation.version, models, measured, time.monotonic() - start)


def check_share(share: float) -> None:
    """Check the initial part of the traffic of a new version.

    Raises:
        WrongUsage: nothing would be left for the other variants.
    """
    if not 0 <= share <= MAX_SHARE:
        raise WrongUsage(
            f"invalid share: expected 0 to {MAX_SHARE:.0%} of the traffic, got {share * 100:.4g}%"
        )


def retire(
    repository: Path,
    name: str,
    version: int,
    record: ServerRecord | None,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Remove a version from the routes, then from the server once it is idle, then from the disk.

    Raises:
        WrongUsage: the version does not exist, or requests can still reach it.
        OperationFailed: the server refuses; the next command continues.
        OSError: a file cannot be read or written.
    """
    with locked_repository(repository, record, report) as (log, unstaged):
        check_none_active(repository, f"retire a version of '{name}'")
        network = find_network(repository, name)
        check_retirable(repository, network, version)
        gone = network.at_version(version)
        actions: tuple[Action, ...] = (
            Install(f"{network.name}/{version}", network.name, version),
            Policy(network.name, version),
            *(Install(pin.model, pin.model) for pin in gone.pins),
            *(AddVariant(v.route, v.variant.name, v.variant.model, v.variant.weight) for v in gone.variants),
        )
        take_out(log, unstaged, "retire", network.name, version, actions)


def rollback(repository: Path, name: str, record: ServerRecord | None) -> list[str]:
    """Take all traffic from the newest version with traffic, and restore the weights from before it.

    It does not wait for a publication, and the version stays loaded. Returns a line for each changed route.

    Raises:
        WrongUsage: no route has the network, or no earlier version of it.
        OperationFailed, InvalidConfig: a route cannot be changed.
    """
    network = find_network(repository, name)
    used = {each.pin.network_version for each in network.variants if each.variant.weight}
    if not used:
        raise WrongUsage(
            f"cannot roll back '{network.name}': no route sends traffic to it, callers request its versions"
        )
    newest = max(used)
    routes = {each.route for each in network.at_version(newest).variants if each.variant.weight}
    found = [
        (location, _rollback_change(location, network, newest))
        for location in find_routes(repository)
        if location.name in routes
    ]
    return [_roll_back(location, propose, record) for location, propose in found]


def _roll_back(location: RouteLocation, propose: Propose, record: ServerRecord | None) -> str:
    """Change a route; a server that does not respond reads the change when it starts again."""
    try:
        server = RunningServer(record) if record else None
        return change_with_retry(location, propose, server, ROLLBACK_S)
    except NotReached as error:
        return f"{change_with_retry(location, propose, None)}: {error}"


def _rollback_change(location: RouteLocation, network: Network, newest: int) -> Propose:
    """Return the change that takes a route back from a version.

    Raises:
        WrongUsage: the route has no earlier version.
    """
    variants = [each for each in network.variants if each.route == location.name]
    current = [each.variant.name for each in variants if each.pin.network_version == newest]
    earlier = sorted(
        (each for each in variants if each.pin.network_version < newest),
        key=lambda each: -each.pin.network_version,
    )
    if not earlier:
        raise WrongUsage(
            f"cannot roll back: route '{location.name}' has no version of '{network.name}' before {newest}"
        )
    return rolled_back(tuple(current), tuple(each.variant.name for each in earlier))


def _prepare(
    operation: Operation,
    network: Network,
    current: int,
    given: Candidate,
    workspace: Workspace,
) -> tuple[Report, tuple[Action, ...]]:
    """Stage and examine a version; return its measurements, and the actions that publish it."""
    config, version = network.config(operation.version), operation.version
    source = given.source
    models, variants = _successors(network, current, version, given.share, workspace)
    staged = workspace.staging / "new" / network.name / str(version)
    candidate.check_labels(source, network.folder)
    candidate.stage(source, staged, config.document.get("default_model_filename") or "model.onnx")
    workspace.report(f"{source.name}: staged as version {version} of '{network.name}'")
    pin = next(iter(network.at_version(current).pins), None)
    present = network.folder / str(current)
    request = pinned.examination_request(network.folder, staged, present, pin, given.gates)
    adapt_successor(request, source, workspace.report)
    if given.precision:
        change = conversion.convert(onnx_file.network_path(staged, config.document))
        conversion.note_change(staged)
        workspace.report(f"changed: {change}")
    measured = examine(request, progress=lambda line: workspace.report(f"examination: {line}"))
    candidate.write_checksums(staged, source, operation.user)
    for template, model in models.items():
        pin = next(pin for pin in network.pins if pin.model == template)
        target = workspace.staging / "new" / model
        pinned.copy_pinned_model(workspace.repository / template, pin, version, target)
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
    network: Network, current: int, version: int, share: float, workspace: Workspace
) -> tuple[dict[str, str], list[AddVariant]]:
    """Return the names of a new version's pinned models by their templates, and its variants."""
    now = network.at_version(current)
    # One variant of each route; the default one is the last, and wins. A fallback keeps its version.
    serving = [each for each in now.variants if not each.is_fallback] or now.variants
    chosen = {each.route: each for each in sorted(serving, key=lambda each: each.is_default)}
    templates = [each.pin.model for each in chosen.values()] or [pin.model for pin in now.pins[:1]]
    models = {name: pinned.successor(name, current, version) for name in templates}
    for model in models.values():
        if (workspace.repository / model).exists():
            raise OperationFailed(
                f"cannot publish version {version}: its model '{model}' already exists; "
                "fix: move that folder out of the repository"
            )
    routes = {location.name: read_state(location).route() for location in find_routes(workspace.repository)}
    variants = []
    for each in chosen.values():
        name = pinned.successor(each.variant.name, current, version)
        names = [variant.name for variant in routes[each.route].variants]
        if len(names) >= MAX_VARIANTS:
            raise RouteFull(
                f"route '{each.route}' is full: expected fewer than {MAX_VARIANTS} variants, "
                f"got {', '.join(names)}; fix: nereid retire old versions"
            )
        if name in names:
            raise OperationFailed(
                f"cannot publish version {version}: route '{each.route}' already has a variant '{name}'; "
                "fix: rename that variant"
            )
        total = sum(variant.weight for variant in routes[each.route].variants)
        weight = share / (1 - share) * (total or 100)
        variants.append(AddVariant(each.route, name, models[each.pin.model], weight))
    return models, variants


def _current(network: Network, against: int) -> int:
    """Return the version that a new one is compared with.

    Raises:
        WrongUsage: that version is not served.
    """
    served = network.served()
    default = [each.pin.network_version for each in network.variants if each.is_default]
    current = against or next(iter(default), served[-1] if served else 0)
    if current not in served:
        known = ", ".join(map(str, served)) or "none"
        raise WrongUsage(
            f"cannot compare with version {current} of '{network.name}': expected a served version, {known}"
        )
    return current


def _next_version(log: OperationJournal, network: Network) -> int:
    """Return the number of the next version, which no earlier version has had."""
    used = [
        line.operation.version
        for line in log.steps.read()
        if line.operation.model == network.name and line.event in ("commit", "undo", "done")
    ]
    return max([*used, *versions_there(network.folder)], default=0) + 1

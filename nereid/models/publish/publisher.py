"""Publication, rollback and retirement of a network's versions while a server continues to respond.

A version is staged next to the repository and examined in a separate process. An accepted version is moved
into the repository, loaded, warmed up, and added to the routes. Every change is first written to the journal.
"""

import dataclasses
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from nereid.backends.routing.assignment import MAX_VARIANTS, Route, with_default
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish import examination, staged_version
from nereid.models.publish.actions import (
    Action,
    AddToVersionPolicy,
    AddVariant,
    Install,
    LoadVersion,
    Warm,
    Workspace,
)
from nereid.models.publish.examination import (
    ExaminationLimits,
    ExaminationRequest,
    Measurements,
    Rejected,
    examine,
)
from nereid.models.publish.importing.adaptation import TO_FP16, Precision, convert_to_fp16, edit_file
from nereid.models.publish.importing.graph_edits import fit_runtimes
from nereid.models.publish.importing.model_importer import named_importer
from nereid.models.publish.network import (
    PublishedNetwork,
    check_retirable,
    copy_pinned_model,
    examination_request,
    find_network,
    successor,
)
from nereid.models.publish.staged_version import Description
from nereid.models.publish.transaction import LockedRepository, StagedOperation, locked_repository
from nereid.models.rollout.rollout_journal import check_none_active
from nereid.models.routes.change import Proposal, Propose, change_with_retry
from nereid.models.routes.location import RouteFileSnapshot, RouteLocation, find_routes, read_route_file
from nereid.repository import onnx_file
from nereid.repository.repository_index import versions_on_disk
from nereid.server.model_control import NotReached
from nereid.server.run_dir import ServerInfo

ROLLBACK_TIMEOUT_S = 30.0
# Giving a version all traffic changes the route, not the repository.
MAX_SHARE = 0.99


class RouteFull(OperationFailed):
    """A route has the maximum number of variants; older ones must be retired first."""


@dataclass(frozen=True, slots=True)
class Published:
    """A served version: its network, the pinned models in front of it, and its measurements."""

    model: str
    version: int
    pinned: tuple[str, ...]
    report: Measurements
    seconds: float

    def line(self, server_info: ServerInfo | None) -> str:
        """Describe what happened in plain words; `server_info` is the running server."""
        behind = f" as {', '.join(self.pinned)}" if self.pinned else ""
        return (
            f"{self.model} {self.version}: {describe_served(server_info)}{behind}, after {self.seconds:.1f} s"
        )


def describe_served(server_info: ServerInfo | None) -> str:
    """Say whether a server already serves a change."""
    return "served" if server_info else "in the repository (no server running)"


def publish(
    repository: Path,
    name: str,
    source: Path,
    server_info: ServerInfo | None,
    limits: ExaminationLimits | None = None,
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
        server_info: the running server, if there is one.
        limits: limits of the examination.
        share: initial fraction of the traffic, 0 to below 1; 0 serves the version only on request.
        report: receives a line per step.
        precision: datatype to which the network is converted; None for no conversion.

    Raises:
        WrongUsage: the model or file does not exist.
        OperationFailed: the examination or the server rejects it, and nothing has changed. `NotReached`: the
            server has gone away, and the next command continues.
        OSError: a file cannot be read or written.
    """
    start = time.monotonic()
    check_share(share)
    with locked_repository(repository, server_info, report) as locked:
        check_none_active(repository, f"publish a version of '{name}'")
        network, limits = find_network(repository, name), limits or ExaminationLimits()
        version = NewVersion(network, _current(network, limits.against), _next_version(locked, network))
        with locked.preparation("publish", network.name, version.number) as staged:
            models, variants = version.successors(repository, share)
            measured = version.stage(staged, source, limits, precision)
            version.copy_pinned_models(models, staged.workspace)
            check_none_active(repository, f"publish a version of '{name}'")  # the examination takes a while
        locked.commit(staged, version.actions(models, variants))
        pinned = tuple(models.values())
        return Published(network.name, version.number, pinned, measured, time.monotonic() - start)


def check_share(share: float) -> None:
    """Check the initial share of a new version; WrongUsage if it is all of the traffic."""
    if not 0 <= share <= MAX_SHARE:
        raise WrongUsage(
            f"invalid share: expected 0 to {MAX_SHARE:.0%} of the traffic, got {share * 100:.4g}%"
        )


def retire(
    repository: Path,
    name: str,
    version: int,
    server_info: ServerInfo | None,
    report: Callable[[str], None] = lambda line: None,
) -> None:
    """Remove a version from the routes, then from the server once it is idle, then from the disk.

    Raises:
        WrongUsage: the version does not exist, or requests can still reach it.
        OperationFailed: the server refuses; the next command continues.
        OSError: a file cannot be read or written.
    """
    with locked_repository(repository, server_info, report) as locked:
        check_none_active(repository, f"retire a version of '{name}'")
        network = find_network(repository, name)
        check_retirable(repository, network, version)
        gone = network.at_version(version)
        actions: tuple[Action, ...] = (
            Install(f"{network.name}/{version}", network.name, version),
            AddToVersionPolicy(network.name, version),
            *(Install(pin.model, pin.model) for pin in gone.pins),
            *(AddVariant(v.route, v.variant.name, v.variant.model, v.variant.weight) for v in gone.variants),
        )
        locked.undo_earlier("retire", network.name, version, actions)


def rollback(repository: Path, name: str, server_info: ServerInfo | None) -> list[str]:
    """Take all traffic off the newest version that has any, and restore the weights from before it.

    It does not wait for a publication, and the version stays loaded. Returns a line for each changed route.

    Raises:
        WrongUsage: no route has the network, or there is no earlier version of it.
        OperationFailed, InvalidConfig: a route cannot be changed.
    """
    network = find_network(repository, name)
    used = {pinned.pin.network_version for pinned in network.variants if pinned.variant.weight}
    if not used:
        raise WrongUsage(
            f"cannot roll back '{network.name}': no route sends traffic to it; callers request its versions"
        )
    newest = max(used)
    routes = {pinned.route for pinned in network.at_version(newest).variants if pinned.variant.weight}
    changes = [
        (location, _rollback_change(location, network, newest))
        for location in find_routes(repository)
        if location.name in routes
    ]
    return [_roll_back(location, propose, server_info) for location, propose in changes]


def _roll_back(location: RouteLocation, propose: Propose, server_info: ServerInfo | None) -> str:
    """Change a route; a server that does not respond reads the change when it starts again."""
    try:
        return change_with_retry(location, propose, server_info, ROLLBACK_TIMEOUT_S)
    except NotReached as error:
        return f"{change_with_retry(location, propose, None)}: {error}"


def _rollback_change(location: RouteLocation, network: PublishedNetwork, newest: int) -> Propose:
    """Return the change that restores the weights that earlier variants had before a version had any.

    If the history has no such weights, the latest of them gets all traffic. WrongUsage: there is none.
    """
    variants = [pinned for pinned in network.variants if pinned.route == location.name]
    current_names = [pinned.variant.name for pinned in variants if pinned.pin.network_version == newest]
    variants.sort(key=lambda pinned: -pinned.pin.network_version)
    earlier_names = [pinned.variant.name for pinned in variants if pinned.pin.network_version < newest]
    if not earlier_names:
        raise WrongUsage(
            f"cannot roll back: route '{location.name}' has no version of '{network.name}' before {newest}"
        )

    def propose(current: RouteFileSnapshot) -> Proposal:
        route, past = current.route(), [entry.parsed() for entry in reversed(current.all_entries)]
        past_weights = (
            _weights(route, earlier_names) for route in past if route and not _weights(route, current_names)
        )
        weights = (
            next(filter(None, past_weights), None) or _weights(route, earlier_names) or {earlier_names[0]: 1}
        )
        # Variants of other networks keep their weights.
        new_weights = dict.fromkeys((*current_names, *earlier_names), 0) | weights
        changed = tuple(replace(v, weight=new_weights.get(v.name, v.weight)) for v in route.variants)
        default = (
            max(weights, key=lambda name: weights[name]) if route.default in current_names else route.default
        )
        back = with_default(replace(route, variants=changed), default)
        return Proposal(back, f"roll back {', '.join(current_names)}")

    return propose


def _weights(route: Route, names: Collection[str]) -> dict[str, float]:
    return {v.name: v.weight for v in route.variants if v.name in names and v.weight}


@dataclass(frozen=True, slots=True)
class NewVersion:
    """The next version of a network, and the version that it follows and is compared with."""

    network: PublishedNetwork
    current: int
    number: int

    def successors(self, repository: Path, share: float) -> tuple[dict[str, str], list[AddVariant]]:
        """Return the names of its pinned models by their templates, and its variants; refuse taken names."""
        now = self.network.at_version(self.current)
        # One variant of each route; the default one is the last, and wins. A fallback keeps its version.
        serving = [pinned for pinned in now.variants if not pinned.is_fallback] or now.variants
        chosen = {v.route: v for v in sorted(serving, key=lambda v: v.is_default)}
        templates = [pinned.pin.model for pinned in chosen.values()] or [pin.model for pin in now.pins[:1]]
        models = {name: self._successor(name) for name in templates}
        for model in models.values():
            if (repository / model).exists():
                raise OperationFailed(
                    f"cannot publish version {self.number}: its model '{model}' already exists; "
                    "fix: move that folder out of the repository"
                )
        routes = {location.name: read_route_file(location).route() for location in find_routes(repository)}
        variants = []
        for pinned in chosen.values():
            name, others = self._successor(pinned.variant.name), routes[pinned.route].variants
            self._check_room(pinned.route, name, [variant.name for variant in others])
            weight = share / (1 - share) * (sum(variant.weight for variant in others) or 100)
            variants.append(AddVariant(pinned.route, name, models[pinned.pin.model], weight))
        return models, variants

    def _successor(self, name: str) -> str:
        return successor(name, self.current, self.number)

    def _check_room(self, route: str, name: str, names: list[str]) -> None:
        if len(names) >= MAX_VARIANTS:
            raise RouteFull(
                f"route '{route}' is full: expected fewer than {MAX_VARIANTS} variants, "
                f"got {', '.join(names)}; fix: nereid retire old versions"
            )
        if name in names:
            raise OperationFailed(
                f"cannot publish version {self.number}: route '{route}' already has a variant '{name}'; "
                "fix: rename that variant"
            )

    def stage(
        self, staged: StagedOperation, source: Path, limits: ExaminationLimits, precision: Precision | None
    ) -> Measurements:
        """Stage and examine the version; return its measurements."""
        network, report = self.network, staged.workspace.report
        document = network.config(self.number).document
        folder = staged.workspace.staging / "new" / network.name / str(self.number)
        staged_version.check_labels(source, network.folder)
        staged_version.stage(source, folder, document.get("default_model_filename") or "model.onnx")
        report(f"{source.name}: staged as version {self.number} of '{network.name}'")
        pin = next(iter(network.at_version(self.current).pins), None)
        current_folder = network.folder / str(self.current)
        request = examination_request(network.folder, folder, current_folder, pin, limits)
        for change in _adapt_staged(request, source, report):
            report(f"changed: {change}")
        if precision:
            convert_to_fp16(onnx_file.network_path(folder, document))
            if description := staged_version.read_description(folder):
                changes = (*description.changes, TO_FP16)
                staged_version.write_description(folder, replace(description, changes=changes))
            report(f"changed: {TO_FP16}")
        measured = examine(request, progress=lambda line: report(f"examination: {line}"))
        staged_version.write_checksums(folder, source, staged.operation.user)
        return measured

    def copy_pinned_models(self, models: dict[str, str], workspace: Workspace) -> None:
        """Write the pinned models of the version, each like its template."""
        pins = {pin.model: pin for pin in self.network.pins}
        for template, model in models.items():
            target = workspace.staging / "new" / model
            copy_pinned_model(workspace.repository / template, pins[template], self.number, target)

    def actions(self, models: dict[str, str], variants: list[AddVariant]) -> tuple[Action, ...]:
        """Return the actions that publish the version."""
        name, number = self.network.name, self.number
        return (
            Install(f"{name}/{number}", name, number),
            AddToVersionPolicy(name, number),
            LoadVersion(name, number),
            *([] if models else [Warm(name, number)]),
            *(Install(model, model) for model in models.values()),
            *(action for model in models.values() for action in (LoadVersion(model, 1), Warm(model, 1))),
            *variants,
        )


def _current(network: PublishedNetwork, against: int) -> int:
    """Return the version that a new one is compared with; WrongUsage if it is not served."""
    served = network.served_versions()
    default = [pinned.pin.network_version for pinned in network.variants if pinned.is_default]
    current = against or next(iter(default), served[-1] if served else 0)
    if current not in served:
        versions = ", ".join(map(str, served)) or "none"
        raise WrongUsage(
            f"cannot compare with version {current} of '{network.name}': expected a served version, "
            f"{versions}"
        )
    return current


def _next_version(locked: LockedRepository, network: PublishedNetwork) -> int:
    """Return the next version number, which no earlier version has used."""
    used = [
        line.operation.version
        for line in locked.events.read()
        if line.operation.model == network.name and line.event in ("commit", "undo", "done")
    ]
    return max([*used, *versions_on_disk(network.folder)], default=0) + 1


def _adapt_staged(request: ExaminationRequest, source: Path, report: Callable[[str], None]) -> list[str]:
    """Change a staged network as the current version was changed, and write its description.

    A network without a description was copied by hand: only its opset, IR version and order of operators may
    change. A task whose networks have only one form also changes it without a description. Returns a sentence
    for each change.

    Raises:
        WrongUsage: the output of the current version does not exist.
        Rejected: the network cannot be run, or does not compute batches like the current version.
    """
    assert request.current is not None
    document, path = request.document, onnx_file.network_path(request.version_folder, request.document)
    past, entry_point = staged_version.read_description(request.current), request.task.entry_point("importer")
    if past is None and entry_point and entry_point.has_one_form:
        past = Description(source="", sha256="", task=entry_point.name)
    if past is None:
        return edit_file(path, fit_runtimes)
    original, content, importer = onnx_file.read(path), path.read_bytes(), named_importer(past.task)
    (image,), outputs = document["input"], document["output"]
    names = [image["name"], *(output["name"] for output in outputs)]
    current = onnx_file.network_path(request.current, document)
    choices = importer.repeat_choices(path, current, past, image)
    importer.adapt(path, choices, names=names)
    without_current = dataclasses.replace(request, current=None)
    first_run = examination.make_first_run(
        without_current, progress=lambda line: report(f"examination: {line}")
    )
    if not first_run.can_batch and int(document.get("max_batch_size", 0)) > 1:
        raise Rejected(
            f"the network computes one {importer.unit} at a time, but the current version computes batches"
        )
    path.write_bytes(content)
    adapted = importer.adapt(path, choices, importer.activation(choices, first_run), names)
    changes = tuple(adapted.changes)
    description = replace(past, source=source.name, sha256=original.sha256, changes=changes)
    staged_version.write_description(request.version_folder, description)
    for note in adapted.notes:
        report(f"note: {note}")
    return adapted.changes

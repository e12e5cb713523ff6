"""A network of a repository: its versions, the pinned models that run it, and copies of them."""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nereid.backends.routing.assignment import Variant, shares
from nereid.base.config.model_config import CONFIGS, ModelConfig, config_path, read_pbtxt
from nereid.base.errors import OperationFailed, WrongUsage
from nereid.models.publish.actions import reason_in_use
from nereid.models.publish.examination import ExaminationLimits, ExaminationRequest
from nereid.models.publish.staged_version import read_description
from nereid.models.routes.location import check_repository, find_routes, read_route_file, readable_routes
from nereid.repository import pbtxt
from nereid.repository.checksums import CHECKSUMS, digest
from nereid.repository.onnx_file import network_path
from nereid.repository.repository_index import (
    PARTS_BY_BACKEND,
    PinnedModel,
    backend_of,
    config_files,
    pinned_models,
    readable_configs,
    served_steps,
    served_versions,
    steps_of,
    versions_on_disk,
)
from nereid.server.model_control import ModelControl
from nereid.server.run_dir import ServerInfo

# Start and end of the first line of a written config; `nereid tune` recognizes its own profile by them.
LIKE, WRITTEN = "# Like ", "written by nereid publish."
PUBLISHED = re.compile(r"^# published (?P<when>\S+) by (?P<who>\S+) from (?P<source>.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PinnedVariant:
    """A variant of a route, and the pinned model that it calls."""

    route: str
    variant: Variant
    pin: PinnedModel
    is_default: bool
    is_fallback: bool = False


@dataclass(frozen=True, slots=True)
class PublishedNetwork:
    """A network of a repository, the pinned models that run it, and the variants that call those."""

    folder: Path
    pins: list[PinnedModel]
    variants: list[PinnedVariant]

    @property
    def name(self) -> str:
        """Return the name of the network's model."""
        return self.folder.name

    def config(self, version: int) -> ModelConfig:
        """Return the plain config for one version."""
        return ModelConfig.from_file(self.folder, version)

    def served_versions(self) -> list[int]:
        """Return the versions that version_policy serves, ascending."""
        return served_versions(self.folder, read_pbtxt(self.folder / "config.pbtxt"))

    def at_version(self, version: int) -> "PublishedNetwork":
        """Return the network with the pinned models and variants of one version only."""
        pins = [pin for pin in self.pins if pin.network_version == version]
        variants = [pinned for pinned in self.variants if pinned.pin.network_version == version]
        return PublishedNetwork(self.folder, pins, variants)


def find_network(repository: Path, name: str) -> PublishedNetwork:
    """Return the network with a name, or behind the pinned model or route with that name.

    Other models and routes that cannot be read are skipped, so that they do not prevent a change.

    Raises:
        WrongUsage: nothing has that name, or several networks are behind it.
        OperationFailed: the route of that name cannot be read.
    """
    check_repository(repository)
    configs = readable_configs(repository)
    pin_of = {pin.model: pin for pin in pinned_models(repository, configs)}
    behind = _behind_route(repository, name, pin_of)
    if len(behind) > 1:
        raise WrongUsage(
            f"route '{name}' has several networks; fix: name one of them: {', '.join(sorted(behind))}"
        )
    name = behind.pop() if behind else name
    name = pin_of[name].network if name in pin_of else name
    plain = {model for model in configs if backend_of(repository / model, configs[model]) == "onnxruntime"}
    networks = sorted(plain.union(pin.network for pin in pin_of.values()))
    if name not in networks:
        raise WrongUsage(f"'{repository}' has no network '{name}', it has: {', '.join(networks) or 'none'}")
    network_pins = [pin for pin in pin_of.values() if pin.network == name]
    return PublishedNetwork(repository / name, network_pins, _variants(repository, network_pins))


def _variants(repository: Path, pins: Iterable[PinnedModel]) -> list[PinnedVariant]:
    """Return the variants that call any of the pinned models, skipping routes that cannot be read."""
    by_model = {pin.model: pin for pin in pins}
    return [
        PinnedVariant(
            name,
            variant,
            by_model[variant.model],
            variant.name == route.default,
            variant.name in route.fallbacks,
        )
        for name, route in readable_routes(repository).items()
        for variant in route.variants
        if variant.model in by_model
    ]


def _behind_route(repository: Path, name: str, pin_of: Mapping[str, PinnedModel]) -> set[str]:
    """Return the networks behind the route `name`; none if it is not a route."""
    return {
        pin_of[variant.model].network if variant.model in pin_of else variant.model
        for location in find_routes(repository)
        if location.name == name
        for variant in read_route_file(location).route().variants
    }


def check_retirable(repository: Path, network: PublishedNetwork, version: int) -> None:
    """Check that a version exists and is not the only one, and that no request can reach it."""
    failure = f"cannot retire version {version} of '{network.name}'"
    there = versions_on_disk(network.folder)
    if version not in there:
        raise WrongUsage(f"{failure}: it does not exist, the versions are: {', '.join(map(str, there))}")
    if network.served_versions() == [version]:
        raise WrongUsage(f"{failure}: it is the only served version; fix: publish another version first")
    gone = network.at_version(version)
    for pinned in gone.variants:
        if reason := reason_in_use(pinned.variant, pinned.is_default, 0, pinned.is_fallback):
            raise WrongUsage(
                f"{failure}: variant '{pinned.variant.name}' of route '{pinned.route}': {reason}"
            )
    if user := next(_users(repository, network.name, version, {pin.model for pin in gone.pins}), None):
        raise WrongUsage(f"{failure}: {user} calls it; fix: change or remove the caller")


def _users(repository: Path, network: str, version: int, retired: set[str]) -> Iterator[str]:
    """Yield the models, variants and shadows that would still call a version after it is retired."""
    for path in sorted(repository.glob("*/config.pbtxt")):
        for file in config_files(path.parent):
            is_step = (network, version) in steps_of(read_pbtxt(file))
            if path.parent.name not in retired and is_step:
                yield f"model '{path.parent.name}'"
    for location in find_routes(repository):
        route = read_route_file(location).route()
        for target in route.targets():
            is_shadow = target in route.shadows and target.model in retired
            if is_shadow or (target.model, target.version) == (network, version):
                yield f"'{target.name}' of route '{location.name}'"


def examination_request(
    folder: Path,
    version_folder: Path,
    current: Path | None,
    pin: PinnedModel | None,
    limits: ExaminationLimits,
) -> ExaminationRequest:
    """Return the request to examine a version of the network in `folder`, with the models beside it.

    `current` is the folder of the version to compare with; `pin` belongs to the model that runs the network.
    """
    repository, document = folder.parent, read_pbtxt(folder / "config.pbtxt")
    labels = (output.get("label_filename") for output in document.get("output", ()))
    past = read_description(current) if current else None
    return ExaminationRequest(
        model=folder.name,
        version_folder=version_folder,
        document=document,
        current=current,
        labels=next((folder / name for name in labels if name), None),
        limits=limits,
        pinned=repository / pin.model if pin else None,
        preprocess=repository / pin.preprocess if pin and pin.preprocess else None,
        preprocess_version=pin.preprocess_version if pin else 0,
        after=repository / pin.after if pin and pin.after else None,
        after_version=pin.after_version if pin else 0,
        described=past.task if past else "",
    )


def successor(name: str, old: int, new: int) -> str:
    """Return the name for a new version: `classify_v1` is followed by `classify_v3`."""
    stem = re.sub(rf"(^|[^A-Za-z0-9])v{old}$", r"\1", name)
    return f"{stem}v{new}" if stem != name else f"{name}_v{new}"


def copy_pinned_model(template: Path, pin: PinnedModel, version: int, target: Path) -> None:
    """Write a copy of a pinned model's folder for another version of its network.

    `pin` is the template's. The target is named like the model. OperationFailed: a profile of the template
    pins a different version than its plain config.
    """
    _copy(template, target)
    head = f"{LIKE}{template.name}, with version {version} of {pin.network}; {WRITTEN}"
    for path in config_files(target):
        text, config = _rename(path, target.name)
        if not _set_network_version(config, pin, version):
            raise OperationFailed(
                f"cannot copy '{template / path.relative_to(target)}': expected a config with version "
                f"{pin.network_version} of '{pin.network}', as in config.pbtxt; fix: correct that profile"
            )
        path.write_text(f"{head}\n{pbtxt.rewrite(text, config)}", encoding="utf-8")


def write_on_cpu(template: Path, target: Path) -> None:
    """Write a model folder that runs a pinned model on the CPU in every profile, with the same versions.

    Its profile `cpu`, or else its plain config, must run all parts in one process.
    """
    source = config_path(template, "cpu")
    document = read_pbtxt(source)
    if document.get("backend") not in PARTS_BY_BACKEND or served_steps(document):
        kind = document.get("backend") or document.get("platform", "none")
        raise OperationFailed(
            f"cannot copy '{source}': expected a backend that runs its models in one process, "
            f"{' or '.join(PARTS_BY_BACKEND)}, got '{kind}'; "
            f"fix: write {CONFIGS}/cpu.pbtxt for '{template.name}'"
        )
    _copy(template, target, CONFIGS)
    text, config = _rename(source, target.name)
    for group in config.instance_group or [config.instance_group.add()]:
        group.kind = group.KIND_CPU
        group.ClearField("gpus")
    head = f"# {template.name} on the CPU, with the same versions; written by nereid route fallback."
    (target / "config.pbtxt").write_text(f"{head}\n{pbtxt.rewrite(text, config)}", encoding="utf-8")


def _copy(template: Path, target: Path, *skipped: str) -> None:
    """Copy the folder of a pinned model, with an empty version 1 instead of its versions."""
    names = {*map(str, versions_on_disk(template)), *skipped}
    shutil.copytree(template, target, ignore=lambda folder, _: names if Path(folder) == template else ())
    (target / "1").mkdir()
    (target / "1" / ".gitkeep").touch()


def _rename(path: Path, name: str) -> tuple[str, Any]:
    """Return a file's text without our head, and its config for a model of another name with version 1."""
    text = path.read_text(encoding="utf-8")
    if text.startswith(LIKE):
        _, _, text = text.partition("\n")
    config = pbtxt.parse(text)
    config.name = name
    config.version_policy.Clear()
    config.version_policy.specific.versions.append(1)
    return text, config


def _set_network_version(config: Any, pin: PinnedModel, version: int) -> bool:
    """Set another version of the network in a config; return whether the config had the version of `pin`."""
    for step in config.ensemble_scheduling.step:
        if (step.model_name, step.model_version) == (pin.network, pin.network_version):
            step.model_version = version
            return True
    texts = {name: value.string_value for name, value in config.parameters.items()}
    if (texts.get("network"), texts.get("network_version")) == (pin.network, str(pin.network_version)):
        config.parameters["network_version"].string_value = str(version)
        return True
    return False


@dataclass(frozen=True, slots=True)
class VersionState:
    """One version of a network.

    Args:
        state: `ready` (loaded by the running server), `not loaded` (the policy serves it, the server has not
            loaded it), `published` (the policy serves it, no server runs), or `not served`.
        published: time of the publication; empty for a version that was copied by hand.
        changes: what was changed in the file, one sentence each.
        shares: fraction of the traffic, 0 to 1, by route.
    """

    version: int
    state: str
    size_bytes: int
    sha256: str
    published: str
    source: str
    changes: tuple[str, ...]
    pinned: tuple[str, ...]
    shares: Mapping[str, float]


def versions(repository: Path, name: str, server_info: ServerInfo | None) -> tuple[str, list[VersionState]]:
    """Return a network's name, and its versions, the newest first.

    Raises:
        WrongUsage: the network does not exist.
        OperationFailed, InvalidConfig: a route, config or description cannot be read, or the server does not
            respond.
    """
    network = find_network(repository, name)
    ready = ModelControl(server_info).ready_versions() if server_info else None
    states = [
        _version_state(repository, network, version, ready) for version in versions_on_disk(network.folder)
    ]
    return network.name, states[::-1]


def _version_state(
    repository: Path, network: PublishedNetwork, version: int, ready: Mapping[str, set[int]] | None
) -> VersionState:
    folder, version_network = network.folder / str(version), network.at_version(version)
    checksums = folder / CHECKSUMS
    origin = PUBLISHED.search(checksums.read_text(encoding="utf-8")) if checksums.exists() else None
    files = [path for path in folder.rglob("*") if path.is_file()]
    model = network_path(folder, network.config(version).document)
    described = read_description(folder)
    names = tuple(pin.model for pin in version_network.pins)
    return VersionState(
        version=version,
        state=_state(network, version, names, ready),
        size_bytes=sum(path.stat().st_size for path in files),
        sha256=digest(model) if model.is_file() else "",
        published=origin["when"] if origin else "",
        source=origin["source"] if origin else "",
        changes=described.changes if described else (),
        pinned=names,
        shares=_shares(repository, version_network),
    )


def _state(
    network: PublishedNetwork, version: int, pinned: tuple[str, ...], ready: Mapping[str, set[int]] | None
) -> str:
    if version not in network.served_versions():
        return "not served"
    if ready is None:
        return "published"
    # Clients call the pinned models, or the network itself if it has none.
    is_loaded = version in ready.get(network.name, ())
    is_ready = all(name in ready for name in pinned) if pinned else is_loaded
    return "ready" if is_ready else "not loaded"


def _shares(repository: Path, network: PublishedNetwork) -> dict[str, float]:
    parts_of: dict[str, float] = {}
    for location in find_routes(repository):
        names = [pinned.variant.name for pinned in network.variants if pinned.route == location.name]
        if names:
            parts = shares(read_route_file(location).route())
            parts_of[location.name] = sum(parts[name] for name in names)
    return parts_of

"""A network of a repository, with the pinned models, variants and shadows that call it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid.base.config.model_config import ModelConfig, read_pbtxt
from nereid.base.errors import WrongUsage
from nereid.models.publish.engine.variants import reason_in_use
from nereid.models.publish.pinned import PinnedVariant, pinned_variants
from nereid.models.routes.target import check_repository, find_routes, read_state
from nereid.repository.layout import (
    Pin,
    backend_of,
    config_files,
    pins,
    readable_configs,
    served_versions,
    steps_of,
    versions_there,
)


@dataclass(frozen=True, slots=True)
class Network:
    """A network of a repository, the pinned models that run it, and the variants that call those."""

    folder: Path
    pins: list[Pin]
    variants: list[PinnedVariant]

    @property
    def name(self) -> str:
        """Return the name of the network's model."""
        return self.folder.name

    def config(self, version: int) -> ModelConfig:
        """Return the plain config for one version."""
        return ModelConfig.from_file(self.folder, version)

    def served(self) -> list[int]:
        """Return the versions that version_policy serves, ascending."""
        return served_versions(self.folder, read_pbtxt(self.folder / "config.pbtxt"))

    def at_version(self, version: int) -> "Network":
        """Return the network with the pinned models and variants of one version only."""
        pins = [pin for pin in self.pins if pin.network_version == version]
        variants = [each for each in self.variants if each.pin.network_version == version]
        return Network(self.folder, pins, variants)


def find_network(repository: Path, name: str) -> Network:
    """Return the network with a name, or behind the pinned model or route with that name.

    Other models and routes that cannot be read are skipped, so that they do not prevent a change.

    Raises:
        WrongUsage: nothing has that name, or several networks are behind it.
        OperationFailed: the route of that name cannot be read.
    """
    check_repository(repository)
    known = readable_configs(repository)
    pin_of = {pin.model: pin for pin in pins(repository, known)}
    behind = _behind_route(repository, name, pin_of)
    if len(behind) > 1:
        raise WrongUsage(
            f"route '{name}' has several networks; fix: name one of them: {', '.join(sorted(behind))}"
        )
    name = behind.pop() if behind else name
    name = pin_of[name].network if name in pin_of else name
    plain = {model for model in known if backend_of(repository / model, known[model]) == "onnxruntime"}
    networks = sorted(plain.union(pin.network for pin in pin_of.values()))
    if name not in networks:
        raise WrongUsage(f"'{repository}' has no network '{name}', it has: {', '.join(networks) or 'none'}")
    found = [pin for pin in pin_of.values() if pin.network == name]
    return Network(repository / name, found, pinned_variants(find_routes(repository), found))


def _behind_route(repository: Path, name: str, pin_of: Mapping[str, Pin]) -> set[str]:
    """Return the networks behind the route `name`; none if it is not a route."""
    return {
        pin_of[variant.model].network if variant.model in pin_of else variant.model
        for location in find_routes(repository)
        if location.name == name
        for variant in read_state(location).route().variants
    }


def check_retirable(repository: Path, network: Network, version: int) -> None:
    """Check that a version exists, and that no request can reach it.

    Raises:
        WrongUsage: it is the only served version, or something can call it.
    """
    failure = f"cannot retire version {version} of '{network.name}'"
    there = versions_there(network.folder)
    if version not in there:
        raise WrongUsage(f"{failure}: it does not exist, the versions are: {', '.join(map(str, there))}")
    if network.served() == [version]:
        raise WrongUsage(f"{failure}: it is the only served version; fix: publish another version first")
    gone = network.at_version(version)
    for each in gone.variants:
        if reason := reason_in_use(each.variant, each.is_default, 0, each.is_fallback):
            raise WrongUsage(f"{failure}: variant '{each.variant.name}' of route '{each.route}': {reason}")
    if user := next(_users(repository, network.name, version, {pin.model for pin in gone.pins}), None):
        raise WrongUsage(f"{failure}: {user} calls it; fix: change or remove the caller")


def _users(repository: Path, network: str, version: int, pinned_models: set[str]) -> Iterator[str]:
    """Yield the models, variants and shadows that would still call a version after it is retired."""
    for path in sorted(repository.glob("*/config.pbtxt")):
        for file in config_files(path.parent):
            is_step = (network, version) in steps_of(read_pbtxt(file))
            if path.parent.name not in pinned_models and is_step:
                yield f"model '{path.parent.name}'"
    for location in find_routes(repository):
        route = read_state(location).route()
        for each in route.targets():
            is_shadow = each in route.shadows and each.model in pinned_models
            if is_shadow or (each.model, each.version) == (network, version):
                yield f"'{each.name}' of route '{location.name}'"

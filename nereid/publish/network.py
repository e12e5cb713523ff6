"""A network of a repository, with all that stands in front of it: pinned models, and variants of routes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nereid.config.model_config import ModelConfig, read_pbtxt
from nereid.errors import WrongUsage
from nereid.publish import pinned
from nereid.repository.layout import Pin, backend_of, pins, readable_configs, served_versions
from nereid.routes.target import find_routes, read_state


@dataclass(frozen=True, slots=True)
class Network:
    """A network of a repository, the pinned models that run it, and the routes' variants that call those."""

    folder: Path
    pins: list[Pin]
    branches: list[pinned.PinnedVariant]

    @property
    def name(self) -> str:
        """The network's name, as a model."""
        return self.folder.name

    def config(self, version: int) -> ModelConfig:
        """Return the plain config, for one version."""
        return ModelConfig.from_file(self.folder, version)

    def served(self) -> list[int]:
        """Return the versions that are to be served, ascending."""
        return served_versions(self.folder, read_pbtxt(self.folder / "config.pbtxt"))

    def of(self, version: int) -> "Network":
        """Return the same with only the pinned models and variants of one version."""
        pins_of = [pin for pin in self.pins if pin.network_version == version]
        branches_of = [each for each in self.branches if each.pin.network_version == version]
        return Network(self.folder, pins_of, branches_of)


def find_network(repository: Path, name: str) -> Network:
    """Return the network that a name stands for: its own, that of a pinned model, or that of a route.

    What cannot be read of other models must not hinder a change, and is passed over.

    Raises:
        WrongUsage: nothing has that name, or several networks are behind it.
        OperationFailed: the route of that name cannot be read.
    """
    if not repository.is_dir():
        raise WrongUsage(f"{repository} is no model repository: there is no such folder")
    known = readable_configs(repository)
    of_model = {pin.model: pin for pin in pins(repository, known)}
    behind = _behind_route(repository, name, of_model)
    if len(behind) > 1:
        raise WrongUsage(f"'{name}' has several networks, say which: {', '.join(sorted(behind))}")
    name = behind.pop() if behind else name
    name = of_model[name].network if name in of_model else name
    plain = {model for model in known if backend_of(repository / model, known[model]) == "onnxruntime"}
    networks = sorted(plain.union(pin.network for pin in of_model.values()))
    if name not in networks:
        raise WrongUsage(f"{repository} has no network '{name}', it has: {', '.join(networks) or 'none'}")
    found = [pin for pin in of_model.values() if pin.network == name]
    return Network(repository / name, found, pinned.branches(find_routes(repository), found))


def _behind_route(repository: Path, name: str, of_model: Mapping[str, Pin]) -> set[str]:
    """Return the networks behind the route `name`; none if there is no such route."""
    return {
        of_model[variant.model].network if variant.model in of_model else variant.model
        for target in find_routes(repository)
        if target.name == name
        for variant in read_state(target).route().variants
    }

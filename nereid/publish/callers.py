"""Callers of a version: variants, shadows and models that prevent its retirement."""

from collections.abc import Iterator
from pathlib import Path

from nereid.config.model_config import read_pbtxt
from nereid.errors import WrongUsage
from nereid.publish.engine.variants import reason_in_use
from nereid.publish.network import Network
from nereid.repository.layout import config_files, steps_of, versions_there
from nereid.routes.target import find_routes, read_state


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
        if reason := reason_in_use(each.variant, each.is_default, 0):
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

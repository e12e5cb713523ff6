"""The pinned models in front of a network's version: which there are, and one like them for a new version."""

import contextlib
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from nereid.errors import OperationFailed
from nereid.repository.layout import Pin, config_files, versions_there
from nereid.routes.target import RouteLocation, read_state
from nereid.routing.assignment import Variant

# How the first line of what is written here begins and ends.
LIKE, WRITTEN = "# Like ", "written by nereid publish."


@dataclass(frozen=True, slots=True)
class PinnedVariant:
    """A variant of a route, and the pinned model that it calls."""

    route: str
    variant: Variant
    pin: Pin
    is_default: bool


def branches(routes: Iterable[RouteLocation], pins: Iterable[Pin]) -> list[PinnedVariant]:
    """Return the variants of all routes that can be read which call one of some pinned models."""
    by_model = {pin.model: pin for pin in pins}
    found = []
    for target in routes:
        with contextlib.suppress(OperationFailed):
            route = read_state(target).route()
            found += [
                PinnedVariant(target.name, variant, by_model[variant.model], variant.name == route.default)
                for variant in route.variants
                if variant.model in by_model
            ]
    return found


def successor(name: str, old: int, new: int) -> str:
    """Return what the new version of a thing is called: `classify_v1` is followed by `classify_v3`."""
    stem = re.sub(rf"(^|[^A-Za-z0-9])v{old}$", r"\1", name)
    return f"{stem}v{new}" if stem != name else f"{name}_v{new}"


def write_like(template: Path, pin: Pin, version: int, target: Path) -> None:
    """Write a model folder like that of a pinned model, for another version of its network.

    Args:
        template: folder of the pinned model.
        pin: what it stands for.
        version: of the network, for the new one.
        target: the new folder; its name is the model's.

    Raises:
        OperationFailed: a profile of the template pins another version than its plain config does.
    """
    own = versions_there(template)
    skipped = {str(number) for number in own}
    shutil.copytree(
        template, target, ignore=lambda folder, names: skipped if Path(folder) == template else ()
    )
    (target / "1").mkdir()
    (target / "1" / ".gitkeep").touch()
    head = f"{LIKE}{template.name}, with version {version} of {pin.network}; {WRITTEN}\n"
    for path in config_files(target):
        config = text_format.Parse(path.read_text(), ModelConfig())
        config.name = target.name
        config.version_policy.Clear()
        config.version_policy.specific.versions.append(1)
        if not _repin(config, pin, version):
            raise OperationFailed(
                f"'{template / path.relative_to(target)}' does not pin version {pin.network_version} of "
                f"'{pin.network}', as the plain config does"
            )
        path.write_text(head + text_format.MessageToString(config))


def _repin(config: Any, pin: Pin, version: int) -> bool:
    """Make a config name another version of its network; returns whether it named the present one."""
    for step in config.ensemble_scheduling.step:
        if (step.model_name, step.model_version) == (pin.network, pin.network_version):
            step.model_version = version
            return True
    if _texts(config.parameters) >= {
        ("network", pin.network),
        ("network_version", str(pin.network_version)),
    }:
        config.parameters["network_version"].string_value = str(version)
        return True
    return False


def _texts(parameters: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(name, value.string_value) for name, value in parameters.items()}

"""Pinned models in front of a version of a network, and copies of them for a new version."""

import contextlib
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nereid.backends.routing.assignment import Variant
from nereid.base.config.model_config import CONFIGS, read_pbtxt
from nereid.base.errors import OperationFailed
from nereid.models.publish.examination.examine import ExaminationRequest, Gates
from nereid.models.routes.target import RouteLocation, read_state
from nereid.repository import pbtxt
from nereid.repository.layout import PARTS, Pin, config_files, served_steps, versions_there
from nereid.tasks.read.reading_settings import BACKEND as READER

# Begin and end of the first line of a written config; `nereid tune` recognizes its own profile by them.
LIKE, WRITTEN = "# Like ", "written by nereid publish."


@dataclass(frozen=True, slots=True)
class PinnedVariant:
    """A variant of a route, and the pinned model that it calls."""

    route: str
    variant: Variant
    pin: Pin
    is_default: bool
    is_fallback: bool = False


def pinned_variants(routes: Iterable[RouteLocation], pins: Iterable[Pin]) -> list[PinnedVariant]:
    """Return the variants that call one of some pinned models, without routes that cannot be read."""
    by_model = {pin.model: pin for pin in pins}
    found = []
    for location in routes:
        with contextlib.suppress(OperationFailed):
            route = read_state(location).route()
            found += [
                PinnedVariant(
                    location.name,
                    variant,
                    by_model[variant.model],
                    variant.name == route.default,
                    variant.name in route.fallbacks,
                )
                for variant in route.variants
                if variant.model in by_model
            ]
    return found


def examination_request(
    folder: Path, candidate: Path, current: Path | None, pin: Pin | None, gates: Gates
) -> ExaminationRequest:
    """Return the request to examine a version of a network, with the models around it.

    Args:
        folder: of the network; the models around it are beside this folder.
        candidate: folder of the version.
        current: folder of the version to compare with; None for a first version.
        pin: of the pinned model that runs the network; None without one.
        gates: the limits.

    Raises:
        InvalidConfig: the config of the network or of the pinned model cannot be read.
    """
    repository, document = folder.parent, read_pbtxt(folder / "config.pbtxt")
    labels = (output.get("label_filename") for output in document.get("output", ()))
    request = ExaminationRequest(
        model=folder.name,
        candidate=candidate,
        document=document,
        current=current,
        labels=next((folder / name for name in labels if name), None),
        gates=gates,
    )
    if not pin:
        return request
    reads = read_pbtxt(repository / pin.model / "config.pbtxt").get("backend") == READER
    return replace(
        request,
        preprocess=repository / pin.preprocess if pin.preprocess else None,
        preprocess_version=pin.preprocess_version,
        after=repository / pin.after if pin.after else None,
        after_version=pin.after_version,
        reader=repository / pin.model if reads else None,
    )


def successor(name: str, old: int, new: int) -> str:
    """Return the name for a new version: `classify_v1` is followed by `classify_v3`."""
    stem = re.sub(rf"(^|[^A-Za-z0-9])v{old}$", r"\1", name)
    return f"{stem}v{new}" if stem != name else f"{name}_v{new}"


def copy_pinned_model(template: Path, pin: Pin, version: int, target: Path) -> None:
    """Write a model folder like that of a pinned model, for another version of its network.

    Args:
        template: folder of the pinned model.
        pin: the network and version that the template runs.
        version: the version of the network that the new model runs.
        target: the new folder; its name is the model's name.

    Raises:
        OperationFailed: a profile of the template pins another version than its plain config does.
    """
    _copy(template, target)
    head = f"{LIKE}{template.name}, with version {version} of {pin.network}; {WRITTEN}"
    for path in config_files(target):
        config = _renamed(path, target.name)
        if not _set_network_version(config, pin, version):
            raise OperationFailed(
                f"cannot copy '{template / path.relative_to(target)}': expected a config with version "
                f"{pin.network_version} of '{pin.network}', as in config.pbtxt; fix: correct that profile"
            )
        path.write_text(pbtxt.write(config, head))


def write_on_cpu(template: Path, target: Path) -> None:
    """Write a model folder that runs a pinned model on the CPU in every profile, with the same versions.

    Args:
        template: folder of the pinned model; its profile `cpu`, or its plain config, runs all parts in one
            process.
        target: the new folder; its name is the model's name.

    Raises:
        OperationFailed: the pinned model sends requests to other models in these configs.
    """
    known = (template / CONFIGS / "cpu.pbtxt", template / "config.pbtxt")
    source = next(path for path in known if path.exists())
    document = read_pbtxt(source)
    if document.get("backend") not in PARTS or served_steps(document):
        kind = document.get("backend") or document.get("platform", "none")
        raise OperationFailed(
            f"cannot copy '{source}': expected a backend that runs its models in one process, "
            f"{' or '.join(PARTS)}, got '{kind}'; fix: write {CONFIGS}/cpu.pbtxt for '{template.name}'"
        )
    _copy(template, target, CONFIGS)
    config = _renamed(source, target.name)
    for group in config.instance_group or [config.instance_group.add()]:
        group.kind = group.KIND_CPU
        group.ClearField("gpus")
    head = f"# {template.name} on the CPU, with the same versions; written by nereid route fallback."
    (target / "config.pbtxt").write_text(pbtxt.write(config, head))


def _copy(template: Path, target: Path, *skipped: str) -> None:
    """Copy the folder of a pinned model, with an empty version 1 instead of its versions."""
    names = {*map(str, versions_there(template)), *skipped}
    shutil.copytree(template, target, ignore=lambda folder, _: names if Path(folder) == template else ())
    (target / "1").mkdir()
    (target / "1" / ".gitkeep").touch()


def _renamed(path: Path, name: str) -> Any:
    """Return the config in a file for a model of another name, which serves version 1."""
    config = pbtxt.parse(path.read_text())
    config.name = name
    config.version_policy.Clear()
    config.version_policy.specific.versions.append(1)
    return config


def _set_network_version(config: Any, pin: Pin, version: int) -> bool:
    """Set another version of the network in a config; return whether the config had the version of `pin`."""
    for step in config.ensemble_scheduling.step:
        if (step.model_name, step.model_version) == (pin.network, pin.network_version):
            step.model_version = version
            return True
    if _texts(config.parameters) >= {("network", pin.network), ("network_version", str(pin.network_version))}:
        config.parameters["network_version"].string_value = str(version)
        return True
    return False


def _texts(parameters: Mapping[str, Any]) -> set[tuple[str, str]]:
    return {(name, value.string_value) for name, value in parameters.items()}

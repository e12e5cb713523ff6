"""Checks that ensembles, fused models and readers fit the models that they consist of."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nereid.backends.triton.steps.after_network import open_after
from nereid.base.config.model_config import FusedSettings, ModelConfig, TensorSpec, read_pbtxt
from nereid.base.serving_errors import InvalidConfig
from nereid.repository.layout import steps_of
from nereid.repository.profile import Profile
from nereid.tasks.read import reading_settings
from nereid.tasks.read.characters import Characters
from nereid.tasks.read.fields.specification import read_specification
from nereid.tasks.read.reading_settings import ReadingSettings
from nereid.vision.inference import network_file

ITS_INPUT = "its input"


# Tensors of an ensemble's steps: the provided ones by name; the needed ones with the step that needs them.
Provided = dict[str, TensorSpec]
Needed = list[tuple[str, str, TensorSpec]]


def problems(profile: Profile, name: str) -> Iterator[str]:
    """Yield the problems of the ensemble `name` that prevent a load, or cause wrong outputs."""
    steps = profile.documents[name]["ensemble_scheduling"].get("step", ())
    if not steps:
        yield "expected steps in ensemble_scheduling, got none"
    if cycle := _cycle(profile, name):
        yield f"its steps form a cycle: {', '.join(cycle)}"
    ensemble = profile.config(name, 1)
    size = ensemble.max_batch_size
    provided = {each.name: _in_ensemble(each, size) for each in ensemble.inputs}
    needed: Needed = []
    for step in steps:
        refused = list(_unservable(profile, name, step))
        yield from refused
        if not refused and step["model_name"] in profile.documents:
            yield from _step_problems(profile, step, size, provided, needed)
    needed += [("the ensemble's output", each.name, _in_ensemble(each, size)) for each in ensemble.outputs]
    for user, tensor, wanted in needed:
        if tensor not in provided:
            yield f"{user} needs tensor '{tensor}', which no step provides"
        elif not wanted.fits(provided[tensor]):
            yield f"{user} needs tensor '{tensor}': expected {wanted.kind}, got {provided[tensor].kind}"


def _in_ensemble(tensor: TensorSpec, max_batch_size: int) -> TensorSpec:
    """Return a model's tensor between steps: its dims begin with the batch if there is one."""
    return replace(tensor, dims=(-1, *tensor.dims)) if max_batch_size else tensor


def _cycle(profile: Profile, name: str) -> list[str]:
    """Return the models of a cycle from an ensemble through others to itself; empty if there is none."""
    ways, seen = [[name]], {name}
    for way in ways:
        steps = profile.documents.get(way[-1], {}).get("ensemble_scheduling", {}).get("step", ())
        found = {step.get("model_name", ""): None for step in steps}
        if name in found and len(way) > 1:
            return [*way, name]
        ways.extend([*way, each] for each in found if each not in seen)
        seen.update(found)
    return []


def _step_problems(
    profile: Profile, step: Mapping[str, Any], size: int, provided: Provided, needed: Needed
) -> Iterator[str]:
    """Yield the problems of a step, and add its tensors to `provided` and `needed`."""
    who = f"step '{step['model_name']}'"
    try:
        config = profile.config(step["model_name"], int(step["model_version"]))
    except InvalidConfig:  # reported by the check of the model itself
        return
    yield from _unmapped(who, step, config)
    if config.max_batch_size < size:
        yield f"{who}: expected max_batch_size {size} or more, like the ensemble, got {config.max_batch_size}"
    outputs = _mapped(step.get("output_map", {}), config.outputs, config.max_batch_size)
    for tensor in outputs.keys() & provided.keys():
        yield f"tensor '{tensor}' is provided twice, once by {who}"
    provided.update(outputs)
    inputs = _mapped(step.get("input_map", {}), config.inputs, config.max_batch_size)
    needed += [(who, tensor, wanted) for tensor, wanted in inputs.items()]


def _unservable(profile: Profile, name: str, step: Mapping[str, Any]) -> Iterator[str]:
    model, version = step["model_name"], int(step.get("model_version", -1))
    if model == name or not (profile.root / model).is_dir():
        yield f"step '{model}' {'is the ensemble itself' if model == name else 'does not exist'}"
    elif version < 1:
        yield f"step '{model}' must be pinned: expected model_version 1 or more, got {version}"
    elif not (profile.root / model / str(version)).is_dir():
        yield f"step '{model}' is pinned to version {version}, which does not exist"
    elif model in profile.documents and version not in profile.versions(model):
        yield f"step '{model}' is pinned to version {version}, which its version_policy does not serve"


def _unmapped(who: str, step: Mapping[str, Any], config: ModelConfig) -> Iterator[str]:
    for side, tensors in (("input", config.inputs), ("output", config.outputs)):
        mapped, names = step.get(f"{side}_map", {}), {tensor.name for tensor in tensors}
        for key in sorted(mapped.keys() - names):
            yield f"{who} has no {side} '{key}', it has: {', '.join(sorted(names))}"
    optional = {tensor.name for tensor in config.inputs if tensor.is_optional}
    for key in sorted({each.name for each in config.inputs} - optional - step.get("input_map", {}).keys()):
        yield f"{who} needs input '{key}', which is not in its input_map"


def _mapped(
    names: Mapping[str, str], tensors: tuple[TensorSpec, ...], max_batch_size: int
) -> dict[str, TensorSpec]:
    """Return a step's tensors by their names in the ensemble."""
    return {names[each.name]: _in_ensemble(each, max_batch_size) for each in tensors if each.name in names}


def fused_problems(profile: Profile, name: str) -> Iterator[str]:
    """Yield the problems of a fused model that prevent a load, and its differences from the ensemble.

    Raises:
        InvalidConfig: a parameter is invalid, or a part is missing.
    """
    config = profile.config(name, 1)
    parts = config.settings(FusedSettings)
    for model, version in parts.models:
        config.sibling(model, version)
        if model not in profile.documents:  # reported by the check of the model itself
            return
    preprocess = profile.config(parts.preprocess, parts.preprocess_version)
    network = profile.config(parts.network, parts.network_version)
    profile.network(parts.network, parts.network_version)
    compared = [
        (f"the input of network '{parts.network}'", network.inputs, preprocess.outputs),
        (ITS_INPUT, config.inputs, preprocess.inputs),
    ]
    if parts.after:
        open_after(config, parts, network)
    else:
        compared.insert(1, ("its output", config.outputs, network.outputs))
    for who, wanted, given in compared:
        yield from _differences(who, wanted, given)
    yield from _differs_from_plain(profile.root / name / "config.pbtxt", {*parts.models})


def _differences(who: str, wanted: tuple[TensorSpec, ...], given: tuple[TensorSpec, ...]) -> Iterator[str]:
    """Compare one tensor with another; names are compared for the model's input only."""
    if len(wanted) != 1 or not given:
        yield f"{who}: expected one tensor, got {len(wanted)}"
        return
    ours, theirs = wanted[0].kind, given[0].kind
    if who == ITS_INPUT:
        ours, theirs = f"'{wanted[0].name}' {ours}", f"'{given[0].name}' {theirs}"
    if ours != theirs:
        yield f"{who}: expected {theirs}, got {ours}"


def _differs_from_plain(plain: Path, named: set[tuple[str, int]]) -> Iterator[str]:
    """Compare the models that a profile names with those of the plain config."""
    expected = {*steps_of(read_pbtxt(plain))} if plain.exists() else set[tuple[str, int]]()
    for model, version in sorted(expected - named):
        got = ", ".join(f"version {each} of '{other}'" for other, each in sorted(named - expected))
        yield f"expected version {version} of '{model}', a step of config.pbtxt, got {got}"


def reader_problems(profile: Profile, name: str) -> Iterator[str]:
    """Yield the problems of a reader of text that prevent a load, and its differences from the plain config.

    Raises:
        InvalidConfig: a parameter is invalid, or a network is missing.
    """
    config = profile.config(name, 1)
    settings = config.settings(ReadingSettings)
    for part, (model, version) in settings.parts.items():
        config.sibling(model, version)
        if model not in profile.documents:  # reported by the check of the model itself
            return
        network = profile.config(model, version)
        if not settings.is_in_process and version not in profile.versions(model):
            yield f"version {version} of '{model}' is not served, and the reader sends requests to it"
        yield from reading_settings.tensor_problems(part, network)
        profile.network(model, version)
    Characters.from_file(network_file.path_of(profile.config(*settings.parts["network"])))
    yield from reading_settings.own_problems(config, settings)
    if path := reading_settings.fields_path(config, settings):
        read_specification(path)
    yield from _differs_from_plain(profile.root / name / "config.pbtxt", {*settings.parts.values()})

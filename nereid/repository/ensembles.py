"""Whether the models that stand for several others, ensembles and fused ones, fit what they are made of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nereid.config.model_config import FusedSettings, ModelConfig, TensorSpec, dims_fit, read_pbtxt
from nereid.serving_errors import InvalidConfig


class Models(Protocol):
    """The models of a repository as one profile serves them."""

    @property
    def root(self) -> Path:
        """Its folder."""

    @property
    def documents(self) -> Mapping[str, Mapping[str, Any]]:
        """The configs that could be read, by model."""

    def versions(self, model: str) -> list[int]:
        """Return the versions that are served."""

    def config(self, model: str, version: int) -> ModelConfig:
        """Return the config of a version, with all inputs and outputs."""

    def network(self, model: str, version: int) -> object:
        """Open the network of a version; raises InvalidConfig if it cannot be served."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """What passes between steps: Triton's datatype, and dims with the batch's first, if there is one."""

    datatype: str
    dims: tuple[int, ...]

    @classmethod
    def of(cls, tensor: TensorSpec, max_batch_size: int) -> "Tensor":
        """Return what a model with this `max_batch_size` takes or gives."""
        return cls(tensor.datatype, (-1, *tensor.dims) if max_batch_size else tensor.dims)

    def fits(self, other: "Tensor") -> bool:
        """Tell whether one can be the other; a dim of -1 is any."""
        return self.datatype == other.datatype and dims_fit(self.dims, other.dims)

    def __str__(self) -> str:
        return f"{self.datatype.removeprefix('TYPE_')} [{','.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True)
class Flow:
    """What the steps of an ensemble give, by name, and what they take: who, its name, and what it must be."""

    given: dict[str, Tensor]
    taken: list[tuple[str, str, Tensor]]

    def mismatches(self) -> Iterator[str]:
        """Say what is taken that nothing gives, or that is something else."""
        for who, name, wanted in self.taken:
            if name not in self.given:
                yield f"{who} needs '{name}', which nothing gives"
            elif not wanted.fits(self.given[name]):
                yield f"{who} needs '{name}' {wanted}, what is given is {self.given[name]}"


def problems(models: Models, name: str) -> Iterator[str]:
    """Say what of the ensemble `name` a server would refuse, or answer wrong."""
    steps = models.documents[name]["ensemble_scheduling"].get("step", ())
    if not steps:
        yield "has no steps"
    if way := _way_back(models, name):
        yield f"its steps lead back to it: {', '.join(way)}"
    ensemble = models.config(name, 1)
    size = ensemble.max_batch_size
    flow = Flow({each.name: Tensor.of(each, size) for each in ensemble.inputs}, [])
    for step in steps:
        refused = list(_unservable(models, name, step))
        yield from refused
        if not refused and step["model_name"] in models.documents:
            yield from _step_problems(models, step, size, flow)
    who = "the ensemble's output"
    flow.taken.extend((who, each.name, Tensor.of(each, size)) for each in ensemble.outputs)
    yield from flow.mismatches()


def _way_back(models: Models, name: str) -> list[str]:
    """Return the models that lead from an ensemble to itself, by way of others; empty if none do."""
    ways, seen = [[name]], {name}
    for way in ways:
        steps = models.documents.get(way[-1], {}).get("ensemble_scheduling", {}).get("step", ())
        found = {step.get("model_name", ""): None for step in steps}
        if name in found and len(way) > 1:
            return [*way, name]
        ways.extend([*way, each] for each in found if each not in seen)
        seen.update(found)
    return []


def _step_problems(models: Models, step: Mapping[str, Any], size: int, flow: Flow) -> Iterator[str]:
    """Say what of a step is wrong, and add what it gives and takes to `flow`."""
    who = f"step '{step['model_name']}'"
    try:
        config = models.config(step["model_name"], int(step["model_version"]))
    except InvalidConfig:  # told where the model itself is checked
        return
    yield from _unmapped(who, step, config)
    if config.max_batch_size < size:
        yield f"{who} takes batches of {config.max_batch_size}, the ensemble of {size}"
    outputs = _mapped(step.get("output_map", {}), config.outputs, config.max_batch_size)
    for tensor in outputs.keys() & flow.given.keys():
        yield f"'{tensor}' is given twice, once by {who}"
    flow.given.update(outputs)
    inputs = _mapped(step.get("input_map", {}), config.inputs, config.max_batch_size)
    flow.taken.extend((who, tensor, wanted) for tensor, wanted in inputs.items())


def _unservable(models: Models, name: str, step: Mapping[str, Any]) -> Iterator[str]:
    model, version = step["model_name"], int(step.get("model_version", -1))
    if model == name or not (models.root / model).is_dir():
        yield f"step '{model}' is {'the ensemble itself' if model == name else 'not there'}"
    elif version < 1:
        yield f"step '{model}' must be pinned to a version, got {version}"
    elif not (models.root / model / str(version)).is_dir():
        yield f"step '{model}' is pinned to version {version}, which is not there"
    elif model in models.documents and version not in models.versions(model):
        yield f"step '{model}' is pinned to version {version}, which its version_policy does not serve"


def _unmapped(who: str, step: Mapping[str, Any], config: ModelConfig) -> Iterator[str]:
    for side, tensors in (("input", config.inputs), ("output", config.outputs)):
        mapped, names = step.get(f"{side}_map", {}), {tensor.name for tensor in tensors}
        for key in sorted(mapped.keys() - names):
            yield f"{who} has no {side} '{key}', it has: {', '.join(sorted(names))}"
    optional = {tensor.name for tensor in config.inputs if tensor.is_optional}
    for key in sorted({each.name for each in config.inputs} - optional - step.get("input_map", {}).keys()):
        yield f"{who} needs input '{key}', which its input_map does not give"


def _mapped(
    names: Mapping[str, str], tensors: tuple[TensorSpec, ...], max_batch_size: int
) -> dict[str, Tensor]:
    """Return a step's tensors by their names in the ensemble."""
    return {names[each.name]: Tensor.of(each, max_batch_size) for each in tensors if each.name in names}


def fused_problems(models: Models, name: str) -> Iterator[str]:
    """Say what of the fused model `name` would fail its load, or be another model than the ensemble.

    Raises:
        InvalidConfig: a parameter is wrong, or a part is missing.
    """
    config = models.config(name, 1)
    parts = config.settings(FusedSettings)
    for model, version in (
        (parts.preprocess, parts.preprocess_version),
        (parts.network, parts.network_version),
    ):
        config.sibling(model, version)
        if model not in models.documents:  # told where the model itself is checked
            return
    preprocess = models.config(parts.preprocess, parts.preprocess_version)
    network = models.config(parts.network, parts.network_version)
    models.network(parts.network, parts.network_version)
    for who, wanted, given in (
        (f"network '{parts.network}' takes", network.inputs, preprocess.outputs),
        ("it answers", config.outputs, network.outputs),
        ("it takes", config.inputs, preprocess.inputs),
    ):
        yield from _differences(who, wanted, given)
    yield from _not_the_ensemble(models.root / name / "config.pbtxt", parts)


def _differences(who: str, wanted: tuple[TensorSpec, ...], given: tuple[TensorSpec, ...]) -> Iterator[str]:
    """Compare one tensor with another; only the name of what it takes counts."""
    if len(wanted) != 1 or not given:
        yield f"{who} {len(wanted)} tensors, expected one"
        return
    ours, theirs = (
        f"{each.datatype.removeprefix('TYPE_')} {list(each.dims)}" for each in (wanted[0], given[0])
    )
    if who == "it takes":
        ours, theirs = f"'{wanted[0].name}' {ours}", f"'{given[0].name}' {theirs}"
    if ours != theirs:
        yield f"{who} {ours}, what is given is {theirs}"


def _not_the_ensemble(plain: Path, parts: FusedSettings) -> Iterator[str]:
    document = read_pbtxt(plain) if plain.exists() else {}
    steps = document.get("ensemble_scheduling", {}).get("step", ())
    expected = {(step["model_name"], int(step.get("model_version", -1))) for step in steps}
    named = {(parts.preprocess, parts.preprocess_version), (parts.network, parts.network_version)}
    for model, version in sorted(expected - named) if steps else ():
        got = ", ".join(f"version {each} of '{other}'" for other, each in sorted(named - expected))
        yield f"config.pbtxt has version {version} of '{model}' as a step, this names {got}"

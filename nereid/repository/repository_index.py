"""The configs, versions, pinned models, threads and labels of a model repository in one profile."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from nereid.base.config.model_config import CONFIGS, FusedSettings, ModelConfig, TensorSpec, read_config
from nereid.base.contract import IMAGE, SCORES
from nereid.base.errors import InvalidConfig, WrongUsage
from nereid.base.processes import available_cores
from nereid.base.task import AS_MODELS
from nereid.base.task_registry import TASK_BY_BACKEND, entry_point_of_backend
from nereid.base.units import split_lines
from nereid.vision.inference.run_sizes import thread_counts


def check_label_count(labels: Path, output: TensorSpec) -> int:
    """Check that a label file has one line per class of an output; return the number of lines.

    Raises:
        InvalidConfig: the numbers differ, or the file cannot be read.
    """
    try:
        count = len(labels.read_text(encoding="utf-8").removesuffix("\n").split("\n"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"cannot read label file '{labels}': {error}") from None
    if -1 not in output.dims and count != (classes := prod(output.dims)):
        raise InvalidConfig(
            f"{labels.name}: expected {classes} labels for the classes of output '{output.name}', got {count}"
        )
    return count


def read_labels(path: Path, classes: int = 0) -> tuple[str, ...]:
    """Return the lines of a user's file; other line breaks of Unicode may be characters of a recogniser.

    Args:
        classes: the number of lines that a network needs; 0 for any.

    Raises:
        WrongUsage: the number differs, or the file is not UTF-8.
    """
    try:
        lines = tuple(split_lines(path.read_text(encoding="utf-8-sig")))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise WrongUsage(
            f"--labels: expected text in UTF-8, got byte {byte:#04x} in '{path.name}'; fix: convert the file"
        ) from None
    if classes and len(lines) != classes:
        raise WrongUsage(
            f"--labels: expected {classes:,} lines, one for each class of the network, got {len(lines):,} in "
            f"'{path.name}'"
        )
    return lines


Documents = Mapping[str, Mapping[str, Any]]
# The backend of routes.
ROUTE = "ab_router"
# Backends of models that name other models in parameters: each part also has a parameter for its version.
# `nereid publish` replaces the part `network`; the part `after` may be missing.
NETWORK_PART, POSTPROCESS_PART = "network", "after"
PARTS_BY_BACKEND: Mapping[str, tuple[str, ...]] = {
    "fused": ("preprocess", NETWORK_PART, POSTPROCESS_PART),
    **{
        name: task.backend.parts
        for name, task in TASK_BY_BACKEND.items()
        if task.backend and task.backend.parts
    },
}


@dataclass(frozen=True, slots=True)
class Threads:
    """The CPU instances of a model, and the threads of each."""

    model: str
    instances: int
    threads: int

    def __str__(self) -> str:
        return f"{self.model} {self.instances}x{self.threads}"


def configs(repository: Path, profile: str = "") -> dict[str, dict[str, Any]]:
    """Return each model's config in `profile`, or the plain one; empty if Triton completes it.

    Raises:
        InvalidConfig: a file is not a ModelConfig.
    """
    return {folder.name: read_config(folder, profile) for folder in model_folders(repository)}


def readable_configs(repository: Path, profile: str = "") -> dict[str, dict[str, Any]]:
    """Return each model's config in `profile`, without those that cannot be read."""
    documents = {}
    for folder in model_folders(repository):
        with contextlib.suppress(InvalidConfig, OSError):
            documents[folder.name] = read_config(folder, profile)
    return documents


def model_folders(repository: Path) -> list[Path]:
    """Return the folders of all models, sorted."""
    return sorted(path for path in repository.iterdir() if path.is_dir() and not path.name.startswith("."))


def is_model(folder: Path) -> bool:
    """Return whether a folder is a model: it has a config, or a version with a file that Triton knows."""
    return (folder / "config.pbtxt").exists() or any(folder.glob("[0-9]*/model.*"))


def unused_models(repository: Path, profile: str) -> set[str]:
    """Return the models used only by models that `profile` replaces with others that do not use them.

    Configs that cannot be read are skipped; Triton reports them.
    """
    plain, served = readable_configs(repository), readable_configs(repository, profile)
    replaced = {
        name for name in plain.keys() & served if served_steps(plain[name]) and not served_steps(served[name])
    }
    return _used_by({n: plain[n] for n in replaced}) - _used_by(served)


def served_versions(folder: Path, document: Mapping[str, Any], without: int = 0) -> list[int]:
    """Return the versions that a model's config serves, ascending; named versions need not exist.

    Args:
        without: a version that is ignored.
    """
    policy = document.get("version_policy", {})
    if "specific" in policy:
        return sorted({*map(int, policy["specific"].get("versions", ()))} - {without})
    there = [version for version in versions_on_disk(folder) if version != without]
    latest = int(policy["latest"].get("num_versions", 0)) if "latest" in policy else 1
    return there if "all" in policy else there[len(there) - min(latest, len(there)) :]


def versions_on_disk(folder: Path) -> list[int]:
    """Return the versions that have a folder, ascending."""
    return sorted(int(path.name) for path in folder.iterdir() if path.is_dir() and path.name.isdecimal())


def config_files(folder: Path) -> list[Path]:
    """Return the config files of a model: the plain one, then the profiles'."""
    plain = folder / "config.pbtxt"
    return [plain] * plain.exists() + sorted((folder / CONFIGS).glob("*.pbtxt"))


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """A pinned model, with versions of network, preprocessing and post-processing; "" and 0 for none."""

    model: str
    network: str
    network_version: int
    preprocess: str
    preprocess_version: int
    after: str = ""
    after_version: int = 0


def pinned_models(repository: Path, documents: Documents | None = None) -> list[PinnedModel]:
    """Return the pinned models: ensembles with one step on ONNX Runtime, and those that name a network.

    Args:
        documents: the configs of all models; by default, the plain ones.
    """
    documents = readable_configs(repository) if documents is None else documents
    return [pin for name in documents if (pin := _pin(repository, name, documents))]


def steps_of(document: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the models and versions that a pinned model runs, in order; version -1 if unpinned."""
    if parts := PARTS_BY_BACKEND.get(str(document.get("backend"))):
        parameters = parameters_of(document)
        pairs = [
            (parameters.get(part, ""), parameters.get(f"{part}_version", ""))
            for part in parts
            if part != POSTPROCESS_PART or parameters.get(part)
        ]
        return [(model, int(number) if number.isdecimal() else -1) for model, number in pairs]
    steps = document.get("ensemble_scheduling", {}).get("step", ())
    return [(step["model_name"], int(step.get("model_version", -1))) for step in steps]


def served_steps(document: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return the models and versions to which a model sends requests; those in its own process are not."""
    backend = document.get("backend", "")
    task = TASK_BY_BACKEND.get(backend)
    task_backend = task.backend if task else None
    location = parameters_of(document).get("networks", task_backend.networks if task_backend else "")
    return [] if backend in PARTS_BY_BACKEND and location != AS_MODELS else steps_of(document)


def parameters_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of a config as strings."""
    return {key: value.get("string_value", "") for key, value in document.get("parameters", {}).items()}


def is_post_processing(backend: str) -> bool:
    """Return whether models of a backend turn a network's outputs into a task's."""
    return backend in TASK_BY_BACKEND and "post_processing" in TASK_BY_BACKEND[backend].entry_points


def _pin(repository: Path, name: str, documents: Documents) -> PinnedModel | None:
    steps = steps_of(documents[name])
    kinds = [backend_of(repository / model, documents.get(model, {})) for model, _ in steps]
    names_network = documents[name].get("backend") in PARTS_BY_BACKEND
    if "onnxruntime" not in kinds or (kinds.count("onnxruntime") != 1 and not names_network):
        return None
    preprocess = steps[kinds.index("preprocess")] if "preprocess" in kinds else ("", 0)
    after = next((step for step, kind in zip(steps, kinds, strict=True) if is_post_processing(kind)), ("", 0))
    backend = str(documents[name].get("backend"))
    network_index = (
        PARTS_BY_BACKEND[backend].index(NETWORK_PART) if names_network else kinds.index("onnxruntime")
    )
    return PinnedModel(name, *steps[network_index], *preprocess, *after)


def thread_budget(
    repository: Path, profile: str, instances: Mapping[str, int] | None = None
) -> list[Threads]:
    """Return the threads of every model of `profile` that runs a network on the CPU.

    Args:
        instances: the instances of models whose configs leave the number open.

    Raises:
        InvalidConfig: a file is not a ModelConfig, or names a model that does not exist.
    """
    hidden = unused_models(repository, profile)
    budget = []
    for name, document in configs(repository, profile).items():
        backend = backend_of(repository / name, document)
        if name in hidden or served_steps(document) or backend not in ("onnxruntime", *PARTS_BY_BACKEND):
            continue
        config = ModelConfig.from_document({**document, "backend": backend}, repository / name, 1)
        network = config
        if backend in PARTS_BY_BACKEND:
            settings = config.settings(entry_point_of_backend(backend, "settings") or FusedSettings)
            network = config.sibling(settings.network, settings.network_version).with_parameters(
                settings.network_overrides
            )
        count = (instances or {}).get(name, config.cpu_instances)
        if processes := count * len(served_versions(repository / name, document)):
            threads = thread_counts(network.parameters, count)
            budget.append(Threads(name, processes, threads.intra_op))
    return budget


def describe_threads(budget: list[Threads]) -> tuple[str, bool]:
    """Return a line with the threads of all models, and whether each model alone fits the cores.

    Several variants may share the cores: a route spreads its requests over them.
    """
    total, cores = sum(model.instances * model.threads for model in budget), available_cores()
    parts = ", ".join(map(str, budget)) or "none"
    text = f"{total} network threads on {cores} cores ({parts})"
    if all(model.instances * model.threads <= cores for model in budget):
        return text, True
    return f"{text}: instances of one model slow each other down", False


def backend_of(folder: Path, document: Mapping[str, Any]) -> str:
    """Return the backend of a model; without an entry, Triton selects ONNX Runtime by the file's name."""
    if document.get("backend"):
        return str(document["backend"])
    is_onnx = document.get("platform") == "onnxruntime_onnx" or any(folder.glob("*/model.onnx"))
    return "onnxruntime" if is_onnx and "ensemble_scheduling" not in document else ""


def _used_by(documents: Documents) -> set[str]:
    return {name for document in documents.values() for name, _ in served_steps(document)}


def output_names(config: Mapping[str, Any]) -> set[str]:
    """Return the outputs of a model for images, empty for other models; a route without any classifies."""
    inputs, outputs = (
        {str(tensor.get("name")) for tensor in config.get(kind, ())} for kind in ("input", "output")
    )
    if config.get("backend") == ROUTE:
        return outputs or {SCORES}
    return outputs if inputs == {IMAGE} else set()

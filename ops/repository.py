"""What a model repository serves in one profile, read from its config files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backend.model_config import FusedSettings, ModelConfig, read_pbtxt
from python_backend.threads import available_cores, thread_counts

Documents = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Threads:
    """How many threads the CPU instances of one model run their network with, each."""

    model: str
    instances: int
    threads: int

    def __str__(self) -> str:
        return f"{self.model} {self.instances}x{self.threads}"


def configs(repository: Path, profile: str = "") -> dict[str, dict[str, Any]]:
    """Return each model's config in `profile`, or the plain one; empty where Triton writes it itself.

    Raises:
        InvalidConfig: a file is no ModelConfig.
    """
    found = {}
    for folder in sorted(path for path in repository.iterdir() if path.is_dir()):
        named, plain = folder / "configs" / f"{profile}.pbtxt", folder / "config.pbtxt"
        path = named if named.exists() else plain
        found[folder.name] = read_pbtxt(path) if path.exists() else {}
    return found


def hidden_models(repository: Path, profile: str) -> set[str]:
    """Return the models that only ensembles use which are no ensembles in `profile`.

    Raises:
        InvalidConfig: a file is no ModelConfig.
    """
    plain, served = configs(repository), configs(repository, profile)
    replaced = {name for name in plain if _steps(plain[name]) and not _steps(served[name])}
    return _used_by({n: plain[n] for n in replaced}) - _used_by(served)


def thread_budget(repository: Path, profile: str) -> list[Threads]:
    """Return the threads of every model of `profile` that runs a network on the CPU.

    Raises:
        InvalidConfig: a file is no ModelConfig, or names what is not there.
    """
    hidden = hidden_models(repository, profile)
    found = []
    for name, document in configs(repository, profile).items():
        backend = _backend(repository / name, document)
        if name in hidden or backend not in ("onnxruntime", "fused"):
            continue
        config = ModelConfig.from_document({**document, "backend": backend}, repository / name, 1)
        network = config
        if backend == "fused":
            names = config.settings(FusedSettings)
            network = config.sibling(names.network, names.network_version)
        if instances := config.cpu_instances * _versions(repository / name, document):
            counts = thread_counts(network.parameters, config.cpu_instances)
            found.append(Threads(name, instances, counts.intra_op))
    return found


def describe_threads(budget: list[Threads]) -> tuple[str, bool]:
    """Return one line about the sum over all models, and whether it fits the cores."""
    total, cores = sum(each.instances * each.threads for each in budget), available_cores()
    parts = ", ".join(map(str, budget)) or "none"
    text = f"{total} network threads on {cores} cores ({parts})"
    if total <= cores:
        return text, True
    return f"{text}: models that are busy at the same time slow each other down", False


def _versions(folder: Path, document: Mapping[str, Any]) -> int:
    """Return how many versions are served at once: each has instances of its own."""
    policy = document.get("version_policy", {})
    there = sum(path.is_dir() and path.name.isdigit() for path in folder.iterdir())
    if "specific" in policy:
        return len(policy["specific"].get("versions", ()))
    return there if "all" in policy else min(there, int(policy.get("latest", {}).get("num_versions", 1)))


def _steps(document: Mapping[str, Any]) -> list[str]:
    return [step["model_name"] for step in document.get("ensemble_scheduling", {}).get("step", ())]


def _used_by(documents: Documents) -> set[str]:
    return {name for document in documents.values() for name in _steps(document)}


def _backend(folder: Path, document: Mapping[str, Any]) -> str:
    if document.get("backend"):
        return str(document["backend"])
    is_onnx = document.get("platform") == "onnxruntime_onnx" or any(folder.glob("*/model.onnx"))
    return "onnxruntime" if is_onnx and not _steps(document) else ""

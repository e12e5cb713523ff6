"""What a model repository serves in one profile, read from its config files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_backend.model_config import FusedSettings, ModelConfig, read_pbtxt
from python_backend.threads import available_cores, thread_counts

CONFIGS = "configs"

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
        named, plain = folder / CONFIGS / f"{profile}.pbtxt", folder / "config.pbtxt"
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


def served_versions(folder: Path, document: Mapping[str, Any], without: int = 0) -> list[int]:
    """Return the versions that a model's config asks to be served, ascending; those named need not exist.

    Args:
        without: a version that is taken for one that is not there.
    """
    policy = document.get("version_policy", {})
    if "specific" in policy:
        return sorted({*map(int, policy["specific"].get("versions", ()))} - {without})
    there = [version for version in versions_there(folder) if version != without]
    return there if "all" in policy else there[-int(policy.get("latest", {}).get("num_versions", 1)) :]


def versions_there(folder: Path) -> list[int]:
    """Return the versions that have a folder, ascending."""
    return sorted(int(path.name) for path in folder.iterdir() if path.is_dir() and path.name.isdecimal())


def config_files(folder: Path) -> list[Path]:
    """Return the config files of a model: the plain one, then those of the profiles."""
    plain = folder / "config.pbtxt"
    return [plain] * plain.exists() + sorted((folder / CONFIGS).glob("*.pbtxt"))


@dataclass(frozen=True, slots=True)
class Pin:
    """What a pinned model stands for: one version of a network, and of the preprocessing in front of it.

    Without preprocessing, that is empty.
    """

    model: str
    network: str
    network_version: int
    preprocess: str
    preprocess_version: int


def pins(repository: Path) -> list[Pin]:
    """Return the pinned models: ensembles of a network, or of preprocessing and a network, fused or not.

    Raises:
        InvalidConfig: a file is no ModelConfig.
    """
    documents = configs(repository)
    return [pin for name, document in documents.items() if (pin := _pin(repository / name, document))]


def _pin(folder: Path, document: Mapping[str, Any]) -> Pin | None:
    if document.get("backend") == "fused":
        config = ModelConfig.from_document(document, folder, 1).settings(FusedSettings)
        return Pin(
            folder.name,
            config.network,
            config.network_version,
            config.preprocess,
            config.preprocess_version,
        )
    steps = document.get("ensemble_scheduling", {}).get("step", ())
    found = [(step["model_name"], int(step.get("model_version", -1))) for step in steps]
    if len(found) not in (1, 2):
        return None
    return Pin(folder.name, *found[-1], *(found[0] if len(found) == 2 else ("", 0)))


def thread_budget(repository: Path, profile: str) -> list[Threads]:
    """Return the threads of every model of `profile` that runs a network on the CPU.

    Raises:
        InvalidConfig: a file is no ModelConfig, or names what is not there.
    """
    hidden = hidden_models(repository, profile)
    found = []
    for name, document in configs(repository, profile).items():
        backend = backend_of(repository / name, document)
        if name in hidden or backend not in ("onnxruntime", "fused"):
            continue
        config = ModelConfig.from_document({**document, "backend": backend}, repository / name, 1)
        network = config
        if backend == "fused":
            names = config.settings(FusedSettings)
            network = config.sibling(names.network, names.network_version)
        if instances := config.cpu_instances * len(served_versions(repository / name, document)):
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


def backend_of(folder: Path, document: Mapping[str, Any]) -> str:
    """Return the backend that runs the model: Triton finds ONNX Runtime's by the name of the file."""
    if document.get("backend"):
        return str(document["backend"])
    is_onnx = document.get("platform") == "onnxruntime_onnx" or any(folder.glob("*/model.onnx"))
    return "onnxruntime" if is_onnx and not _steps(document) else ""


def _steps(document: Mapping[str, Any]) -> list[str]:
    return [step["model_name"] for step in document.get("ensemble_scheduling", {}).get("step", ())]


def _used_by(documents: Documents) -> set[str]:
    return {name for document in documents.values() for name in _steps(document)}

"""Checks of a repository in all profiles, without a server: they find most reasons for a failed load."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from nereid.backends.routing import route_file
from nereid.backends.triton.post_processing import open_post_processing
from nereid.base.config.model_config import (
    CONFIGS,
    FusedSettings,
    ModelConfig,
    TensorSpec,
    read_config,
    read_pbtxt,
)
from nereid.base.errors import InvalidConfig
from nereid.base.task_registry import entry_point_of_backend
from nereid.repository import onnx_file
from nereid.repository.checksums import CHECKSUMS, changes_since_publication, listed_files
from nereid.repository.onnx_file import OnnxFile
from nereid.repository.repository_index import (
    backend_of,
    check_label_count,
    config_files,
    model_folders,
    served_versions,
    steps_of,
)
from nereid.repository.triton_rules import apply_rules
from nereid.vision.imaging.preprocess_settings import PreprocessSettings
from nereid.vision.inference.signature import validate

ReadNetwork = Callable[[Path], OnnxFile | str]


def _read_network(path: Path) -> OnnxFile | str:
    """Return an ONNX file without its weights, or the reason why it cannot be served."""
    try:
        file = onnx_file.read(path)
        onnx_file.check_external_data(file)
        onnx_file.check_runtimes(file, onnx_file.supported_runtimes())
        onnx_file.check_with_onnx(path)
    except onnx_file.InvalidOnnx as error:
        return str(error)
    return replace(file, model=None)


@dataclass(frozen=True, slots=True)
class Profile:
    """A repository in one profile: the config file that a server uses for each model, and its content."""

    root: Path
    files: Mapping[str, str]
    documents: Mapping[str, Mapping[str, Any]]
    read_network: ReadNetwork

    def backend(self, model: str) -> str:
        """Return the name of the backend that runs `model`."""
        return backend_of(self.root / model, self.documents[model])

    def versions(self, model: str) -> list[int]:
        """Return the versions of `model` that are served."""
        return served_versions(self.root / model, self.documents[model])

    def network(self, model: str, version: int) -> OnnxFile:
        """Return the network of a version.

        Raises:
            InvalidConfig: it is missing, or cannot be served.
        """
        path = onnx_file.network_path(self.root / model / str(version), self.documents[model])
        outcome = self.read_network(path)
        if isinstance(outcome, str):
            raise InvalidConfig(outcome)
        return outcome

    def config(self, model: str, version: int) -> ModelConfig:
        """Return the config of a version, completed as the server completes it.

        Raises:
            InvalidConfig: its network is needed and cannot be read.
        """
        document = {"name": model, **self.documents[model], "backend": self.backend(model)}
        if document["backend"] == "onnxruntime":
            onnx_file.complete_document(document, lambda: self.network(model, version).signature)
        return ModelConfig.from_document(document, self.root / model, version)

    def differences_from_plain(self, model: str, named: set[tuple[str, int]]) -> Iterator[str]:
        """Yield the steps of a model's plain config that it does not name in this profile."""
        expected = {*steps_of(read_config(self.root / model, profile=""))}
        for name, version in sorted(expected - named):
            got = ", ".join(f"version {number} of '{other}'" for other, number in sorted(named - expected))
            yield f"expected version {version} of '{name}', a step of config.pbtxt, got {got}"


CheckStatus = Literal["ok", "note", "fail"]
Check = Callable[[Profile, str], Iterator[tuple[CheckStatus, str]]]


def verdicts(
    problems: Callable[[Profile, str], Iterator[str]], otherwise: str, profile: Profile, model: str
) -> Iterator[tuple[CheckStatus, str]]:
    """Yield a failure for each problem of a model, or else `otherwise` as the finding."""
    failures: list[tuple[CheckStatus, str]] = [("fail", problem) for problem in problems(profile, model)]
    yield from failures or [("ok", otherwise)]


ITS_INPUT = "its input"
# Tensors of an ensemble's steps: the provided ones by name; the needed ones with the step that needs them.
Provided = dict[str, TensorSpec]
Needed = list[tuple[str, str, TensorSpec]]


def _ensemble_problems(profile: Profile, name: str) -> Iterator[str]:
    steps = profile.documents[name]["ensemble_scheduling"].get("step", ())
    if not steps:
        yield "expected steps in ensemble_scheduling, got none"
    if cycle := _cycle(profile, name):
        yield f"its steps form a cycle: {', '.join(cycle)}"
    ensemble = profile.config(name, 1)
    size = ensemble.max_batch_size
    provided = {spec.name: _in_ensemble(spec, size) for spec in ensemble.inputs}
    needed: Needed = []
    for step in steps:
        refused = list(_unservable(profile, name, step))
        yield from refused
        if not refused and step["model_name"] in profile.documents:
            yield from _step_problems(profile, step, size, provided, needed)
    needed += [("the ensemble's output", spec.name, _in_ensemble(spec, size)) for spec in ensemble.outputs]
    for user, tensor, expected in needed:
        if tensor not in provided:
            yield f"{user} needs tensor '{tensor}', which no step provides"
        elif not expected.fits(provided[tensor]):
            got = provided[tensor].type_and_dims
            yield f"{user} needs tensor '{tensor}': expected {expected.type_and_dims}, got {got}"


def _in_ensemble(tensor: TensorSpec, max_batch_size: int) -> TensorSpec:
    """Return a model's tensor between steps: its dims begin with the batch if there is one."""
    return replace(tensor, dims=(-1, *tensor.dims)) if max_batch_size else tensor


def _cycle(profile: Profile, name: str) -> list[str]:
    """Return the models of a cycle from an ensemble through others to itself; empty if there is none."""
    ways, seen = [[name]], {name}
    for way in ways:
        steps = profile.documents.get(way[-1], {}).get("ensemble_scheduling", {}).get("step", ())
        models = {step.get("model_name", ""): None for step in steps}
        if name in models and len(way) > 1:
            return [*way, name]
        ways.extend([*way, model] for model in models if model not in seen)
        seen.update(models)
    return []


def _step_problems(
    profile: Profile, step: Mapping[str, Any], size: int, provided: Provided, needed: Needed
) -> Iterator[str]:
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
    needed += [(who, tensor, expected) for tensor, expected in inputs.items()]


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
    for key in sorted({spec.name for spec in config.inputs} - optional - step.get("input_map", {}).keys()):
        yield f"{who} needs input '{key}', which is not in its input_map"


def _mapped(
    names: Mapping[str, str], tensors: tuple[TensorSpec, ...], max_batch_size: int
) -> dict[str, TensorSpec]:
    return {names[spec.name]: _in_ensemble(spec, max_batch_size) for spec in tensors if spec.name in names}


def _fused_problems(profile: Profile, name: str) -> Iterator[str]:
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
        open_post_processing(config, parts, network)
    else:
        compared.insert(1, ("its output", config.outputs, network.outputs))
    for who, actual, expected in compared:
        yield from _differences(who, actual, expected)
    yield from profile.differences_from_plain(name, {*parts.models})


def _differences(who: str, actual: tuple[TensorSpec, ...], expected: tuple[TensorSpec, ...]) -> Iterator[str]:
    """Compare one tensor with another; names are compared for the model's input only."""
    if len(actual) != 1 or not expected:
        yield f"{who}: expected one tensor, got {len(actual)}"
        return
    actual_text, expected_text = (
        f"'{spec.name}' {spec.type_and_dims}" if who == ITS_INPUT else spec.type_and_dims
        for spec in (actual[0], expected[0])
    )
    if actual_text != expected_text:
        yield f"{who}: expected {expected_text}, got {actual_text}"


PLAIN_CONFIG = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class ModelFinding:
    """The result of one check: `ok`, `note` (the model works) or `fail`, the finding, and a fix if known."""

    verdict: CheckStatus
    model: str
    what: str
    found: str
    fix: str = ""


def check(repository: Path) -> list[ModelFinding]:
    """Check every model of a repository in every profile.

    Raises:
        OperationFailed: the package that reads ONNX files is not installed.
    """
    documents, findings = _read_configs(repository)
    read_network = cache(_read_network)  # each file once for all profiles
    profiles = sorted({name for model in documents.values() for name in model})
    for name in profiles:
        profile = _profile(repository, documents, name, read_network)
        for model in profile.documents:
            findings += _check_model(profile, model)
    for folder in _version_folders(repository):
        findings += _version_folder(folder)
    findings += _hidden_folders(repository)
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.model)


def summarize(repository: Path, findings: list[ModelFinding], model: str = "") -> str:
    """Return the counts of all models or of one, such as `5 models, 9 versions: 2 notes, 0 failures`."""
    models = [folder.name for folder in model_folders(repository) if model in ("", folder.name)]
    versions = [folder for folder in _version_folders(repository) if folder.parent.name in models]
    notes, failures = (sum(result.verdict == verdict for result in findings) for verdict in ("note", "fail"))
    parts = [(len(models), "model"), (len(versions), "version"), (notes, "note"), (failures, "failure")]
    counted = [f"{number} {word}{'' if number == 1 else 's'}" for number, word in parts]
    return f"{counted[0]}, {counted[1]}: {counted[2]}, {counted[3]}"


def _version_folders(repository: Path) -> list[Path]:
    return [
        path
        for model in model_folders(repository)
        for path in sorted(model.iterdir())
        if path.is_dir() and path.name.isdigit()
    ]


def _read_configs(repository: Path) -> tuple[dict[str, dict[str, Any]], list[ModelFinding]]:
    documents: dict[str, dict[str, Any]] = {}
    findings: list[ModelFinding] = []
    for folder in model_folders(repository):
        documents[folder.name] = {} if (folder / PLAIN_CONFIG).exists() else {"": {}}
        for path in config_files(folder):
            subject = str(path.relative_to(folder))
            try:
                document = read_pbtxt(path)
            except InvalidConfig as error:
                findings.append(
                    ModelFinding("fail", folder.name, subject, _line(error), "correct the config")
                )
                continue
            name = document.get("name", folder.name)
            if name != folder.name:
                text = f"expected name '{folder.name}' like the folder, got '{name}'"
                findings.append(ModelFinding("fail", folder.name, subject, text, f'name: "{folder.name}"'))
            documents[folder.name]["" if path.parent == folder else path.stem] = document
    return documents, findings


def _profile(
    root: Path, documents: Mapping[str, Mapping[str, Any]], name: str, read_network: ReadNetwork
) -> Profile:
    profile_of = {model: name if name in profiles else "" for model, profiles in documents.items()}
    profile_of = {model: profile for model, profile in profile_of.items() if profile in documents[model]}
    files = {
        model: f"{CONFIGS}/{profile}.pbtxt" if profile else PLAIN_CONFIG
        for model, profile in profile_of.items()
    }
    used = {model: documents[model][profile] for model, profile in profile_of.items()}
    return Profile(root, files, used, read_network)


def _check_model(profile: Profile, model: str) -> Iterator[ModelFinding]:
    for name, run in _checks(profile, model):
        subject = f"{profile.files[model]}, {name}"
        try:
            for verdict, text in run(profile, model):
                yield ModelFinding(verdict, model, subject, text)
        except (InvalidConfig, OSError) as error:
            yield ModelFinding("fail", model, subject, _line(error))
        except (LookupError, ValueError) as error:  # such as a tensor or step without a name
            text = f"the config is incomplete: {type(error).__name__}: {error}"
            yield ModelFinding("fail", model, subject, text)


def _checks(profile: Profile, model: str) -> Iterator[tuple[str, Check]]:
    document = profile.documents[model]
    kind = "ensemble" if "ensemble_scheduling" in document else profile.backend(model)
    yield "Triton's rules", _rules
    yield "versions", _versions
    if run := entry_point_of_backend(kind, "check") or CHECKS.get(kind):
        yield kind, run
    if any(entry.get("label_filename") for entry in document.get("output", ())):
        yield "labels", _labels


def _rules(profile: Profile, model: str) -> Iterator[tuple[CheckStatus, str]]:
    yield from apply_rules(profile.root / model, profile.documents[model])


def _versions(profile: Profile, model: str) -> Iterator[tuple[CheckStatus, str]]:
    served = profile.versions(model)
    if not served:
        yield "fail", "no version would be served: version_policy selects none"
    for version in served:
        if not (profile.root / model / str(version)).is_dir():
            yield "fail", f"version_policy serves version {version}, which does not exist"
    yield "ok", f"serves {', '.join(map(str, served))}"


def _networks(profile: Profile, model: str) -> Iterator[tuple[CheckStatus, str]]:
    for version in profile.versions(model):
        if not (profile.root / model / str(version)).is_dir():
            continue
        try:
            file = profile.network(model, version)
            validate(profile.config(model, version), file.signature)
        except InvalidConfig as error:
            yield "fail", f"version {version}: {_line(error)}"
            continue
        stamps = f"opset {file.opset}, IR version {file.ir_version}"
        yield "ok", f"version {version}: {stamps}, fits its config"
        if file.custom_domains:
            domains = ", ".join(file.custom_domains)
            yield (
                "note",
                f"version {version} has custom operators of {domains}; every server needs their library",
            )


def _preprocess(profile: Profile, model: str) -> Iterator[tuple[CheckStatus, str]]:
    settings = PreprocessSettings.from_config(profile.config(model, 1))
    yield "ok", f"returns images of {settings.transform.height_px}x{settings.transform.width_px} px"


def _route(profile: Profile, model: str) -> Iterator[tuple[CheckStatus, str]]:
    config = profile.config(model, 1)
    path = route_file.path_of(config)
    try:
        text, _ = route_file.read(path)
    except OSError as error:
        raise InvalidConfig(f"cannot read '{path}': {error.strerror}") from None
    loaded = route_file.load_route(config, text)
    for target in loaded.route.targets():
        served = profile.versions(target.model) if target.model in profile.documents else [target.version]
        if target.version not in served:
            yield (
                "fail",
                f"'{target.name}' names version {target.version} of '{target.model}', which is not served",
            )
    yield "ok", f"{path.name}: {len(loaded.route.variants)} variants"


def _labels(profile: Profile, model: str) -> Iterator[tuple[CheckStatus, str]]:
    document = profile.documents[model]
    folder = profile.root / model
    outputs = {tensor.name: tensor for tensor in ModelConfig.from_document(document, folder, 1).outputs}
    for entry in document["output"]:
        name = entry.get("label_filename")
        if not name:
            continue
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InvalidConfig(
                f"label file '{name}' is outside the model's folder, which Triton 26.02 and later refuses"
            )
        if (folder / name).is_symlink():
            raise InvalidConfig(f"label file '{name}' is a link; fix: replace it by a copy of its target")
        labels = check_label_count(folder / name, outputs[entry["name"]])
        yield "ok", f"{name} has {labels} labels for output '{entry['name']}'"


# Checks by backend. Backends of tasks have their own; other backends are not checked.
CHECKS: Mapping[str, Check] = {
    "onnxruntime": _networks,
    "ensemble": partial(
        verdicts, _ensemble_problems, "its steps are pinned and served, and their tensors fit"
    ),
    "fused": partial(verdicts, _fused_problems, "its parts exist, and their tensors fit"),
    "preprocess": _preprocess,
    "ab_router": _route,
}


def _hidden_folders(repository: Path) -> Iterator[ModelFinding]:
    for path in repository.glob(".*/"):
        text = "Triton takes a hidden folder for a model when it loads all models"
        yield ModelFinding("note", path.name, "hidden folder", text, "move the folder out of the repository")


def _version_folder(folder: Path) -> Iterator[ModelFinding]:
    """Check that git would keep the folder, and that its files are unchanged since publication."""
    model, subject = folder.parent.name, f"version {folder.name}"
    if not any(folder.iterdir()):
        text = "the folder is empty, and git does not store empty folders"
        yield ModelFinding("note", model, subject, text, f"touch {folder}/.gitkeep")
        return
    files = listed_files(folder)
    if CHECKSUMS not in files:
        if files:
            yield ModelFinding("note", model, subject, f"not published by nereid: no {CHECKSUMS}")
        return
    problems = list(changes_since_publication(folder))
    for problem in problems:
        yield ModelFinding(
            "fail", model, subject, problem, "versions are immutable; publish a new one with nereid publish"
        )
    if not problems:
        yield ModelFinding("ok", model, subject, f"unchanged since publication: {len(files) - 1} files")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())

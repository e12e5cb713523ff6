"""Checks of a repository in all profiles, without a server: they find most reasons for a failed load."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from nereid.backends.routing import route_file
from nereid.base.config.model_config import CONFIGS, ModelConfig, read_pbtxt
from nereid.base.serving_errors import InvalidConfig
from nereid.repository import ensembles
from nereid.repository.checksums import CHECKSUMS, changes_since_publication, listed_files
from nereid.repository.labels import InvalidLabels, check_count
from nereid.repository.layout import config_files, model_folders
from nereid.repository.profile import NetworkCache, Profile
from nereid.repository.triton_rules import apply_rules
from nereid.tasks.detect.detector import Detector
from nereid.vision.imaging.preprocess_settings import PreprocessSettings
from nereid.vision.inference.signature import validate

PLAIN = "config.pbtxt"
Verdict = Literal["ok", "note", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: `ok`, `note` (the model works) or `fail`, the finding, and a fix if known."""

    verdict: Verdict
    model: str
    what: str
    found: str
    fix: str = ""


Check = Callable[[Profile, str], Iterator[tuple[Verdict, str]]]


def check(repository: Path) -> list[Finding]:
    """Check every model of a repository in every profile.

    Raises:
        OperationFailed: the package that reads ONNX files is not installed.
    """
    documents, findings = _read_configs(repository)
    networks = NetworkCache()
    profiles = sorted({name for model in documents.values() for name in model})
    for name in profiles:
        profile = _profile(repository, documents, name, networks)
        for model in profile.documents:
            findings += _check_model(profile, model)
    for folder in _version_folders(repository):
        findings += _version_folder(folder)
    findings += _hidden_folders(repository)
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.model)


def count(repository: Path, findings: list[Finding], model: str = "") -> str:
    """Return the counts of all models or of one, such as `5 models, 9 versions: 2 notes, 0 failures`."""
    models = [each.name for each in model_folders(repository) if model in ("", each.name)]
    versions = [each for each in _version_folders(repository) if each.parent.name in models]
    notes, failures = (sum(each.verdict == verdict for each in findings) for verdict in ("note", "fail"))
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


def _read_configs(repository: Path) -> tuple[dict[str, dict[str, Any]], list[Finding]]:
    """Return each model's readable configs by profile; the plain config has the profile ""."""
    found: dict[str, dict[str, Any]] = {}
    findings: list[Finding] = []
    for folder in model_folders(repository):
        found[folder.name] = {} if (folder / PLAIN).exists() else {"": {}}
        for path in config_files(folder):
            what = str(path.relative_to(folder))
            try:
                document = read_pbtxt(path)
            except InvalidConfig as error:
                findings.append(Finding("fail", folder.name, what, _line(error), "correct the config"))
                continue
            name = document.get("name", folder.name)
            if name != folder.name:
                text = f"expected name '{folder.name}' like the folder, got '{name}'"
                findings.append(Finding("fail", folder.name, what, text, f'name: "{folder.name}"'))
            found[folder.name]["" if path.parent == folder else path.stem] = document
    return found, findings


def _profile(
    root: Path, documents: Mapping[str, Mapping[str, Any]], name: str, networks: NetworkCache
) -> Profile:
    taken = {model: name if name in found else "" for model, found in documents.items()}
    taken = {model: each for model, each in taken.items() if each in documents[model]}
    return Profile(
        root,
        {model: f"{CONFIGS}/{each}.pbtxt" if each else PLAIN for model, each in taken.items()},
        {model: documents[model][each] for model, each in taken.items()},
        networks,
    )


def _check_model(profile: Profile, model: str) -> Iterator[Finding]:
    """Run all checks for the kind of a model."""
    for name, run in _checks(profile, model):
        what = f"{profile.files[model]}, {name}"
        try:
            for verdict, found in run(profile, model):
                yield Finding(verdict, model, what, found)
        except (InvalidConfig, InvalidLabels, OSError) as error:
            yield Finding("fail", model, what, _line(error))
        except (LookupError, ValueError) as error:  # such as a tensor or step without a name
            found = f"the config is incomplete: {type(error).__name__}: {error}"
            yield Finding("fail", model, what, found)


def _checks(profile: Profile, model: str) -> Iterator[tuple[str, Check]]:
    document = profile.documents[model]
    kind = "ensemble" if "ensemble_scheduling" in document else profile.backend(model)
    yield "Triton's rules", _rules
    yield "versions", _versions
    if kind in CHECKS:
        yield kind, CHECKS[kind]
    if any(entry.get("label_filename") for entry in document.get("output", ())):
        yield "labels", _labels


def _rules(profile: Profile, model: str) -> Iterator[tuple[Verdict, str]]:
    yield from apply_rules(profile.root / model, profile.documents[model])


def _versions(profile: Profile, model: str) -> Iterator[tuple[Verdict, str]]:
    served = profile.versions(model)
    if not served:
        yield "fail", "no version would be served: version_policy selects none"
    for version in served:
        if not (profile.root / model / str(version)).is_dir():
            yield "fail", f"version_policy serves version {version}, which does not exist"
    yield "ok", f"serves {', '.join(map(str, served))}"


def _networks(profile: Profile, model: str) -> Iterator[tuple[Verdict, str]]:
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


def _combination(
    find: Callable[[Profile, str], Iterator[str]], otherwise: str, profile: Profile, model: str
) -> Iterator[tuple[Verdict, str]]:
    problems = [*find(profile, model)]
    yield from (("fail", problem) for problem in problems)
    if not problems:
        yield "ok", otherwise


def _preprocess(profile: Profile, model: str) -> Iterator[tuple[Verdict, str]]:
    settings = PreprocessSettings.from_config(profile.config(model, 1))
    yield "ok", f"returns images of {settings.transform.height_px}x{settings.transform.width_px} px"


def _boxes(profile: Profile, model: str) -> Iterator[tuple[Verdict, str]]:
    for version in profile.versions(model):
        head = Detector.from_config(profile.config(model, version)).head
        classes = f", {head.classes} classes" if head.classes else ""
        yield "ok", f"head {head.name}{classes}"


def _route(profile: Profile, model: str) -> Iterator[tuple[Verdict, str]]:
    config = profile.config(model, 1)
    path = route_file.path_of(config)
    try:
        text, _ = route_file.read(path)
    except OSError as error:
        raise InvalidConfig(f"cannot read '{path}': {error.strerror}") from None
    table = route_file.read_table(config, text)
    for target in table.route.targets():
        served = profile.versions(target.model) if target.model in profile.documents else [target.version]
        if target.version not in served:
            yield (
                "fail",
                f"'{target.name}' names version {target.version} of '{target.model}', which is not served",
            )
    yield "ok", f"{path.name}: {len(table.route.variants)} variants"


def _labels(profile: Profile, model: str) -> Iterator[tuple[Verdict, str]]:
    document = profile.documents[model]
    folder = profile.root / model
    outputs = {tensor.name: tensor for tensor in ModelConfig.from_document(document, folder, 1).outputs}
    for entry in document["output"]:
        name = entry.get("label_filename")
        if not name:
            continue
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise InvalidLabels(
                f"label file '{name}' is outside the model's folder, which Triton 26.02 and later refuses"
            )
        if (folder / name).is_symlink():
            raise InvalidLabels(f"label file '{name}' is a link; fix: replace it by a copy of its target")
        labels = check_count(folder / name, outputs[entry["name"]])
        yield "ok", f"{name} has {labels} labels for output '{entry['name']}'"


# By backend; other backends are not checked.
CHECKS: Mapping[str, Check] = {
    "onnxruntime": _networks,
    "ensemble": partial(
        _combination, ensembles.problems, "its steps are pinned and served, and their tensors fit"
    ),
    "fused": partial(_combination, ensembles.fused_problems, "its parts exist, and their tensors fit"),
    "preprocess": _preprocess,
    "text_reader": partial(
        _combination, ensembles.reader_problems, "its networks exist, and their tensors fit"
    ),
    "ab_router": _route,
    "boxes": _boxes,
}


def _hidden_folders(repository: Path) -> Iterator[Finding]:
    for path in repository.glob(".*/"):
        found = "Triton takes a hidden folder for a model when it loads all models"
        yield Finding("note", path.name, "hidden folder", found, "move the folder out of the repository")


def _version_folder(folder: Path) -> Iterator[Finding]:
    """Check that git would keep the folder, and that its files are unchanged since publication."""
    model, what = folder.parent.name, f"version {folder.name}"
    if not any(folder.iterdir()):
        found = "the folder is empty, and git does not store empty folders"
        yield Finding("note", model, what, found, f"touch {folder}/.gitkeep")
        return
    files = listed_files(folder)
    if CHECKSUMS not in files:
        if files:
            yield Finding("note", model, what, f"not published by nereid: no {CHECKSUMS}")
        return
    problems = list(changes_since_publication(folder))
    for found in problems:
        yield Finding(
            "fail", model, what, found, "versions are immutable; publish a new one with nereid publish"
        )
    if not problems:
        yield Finding("ok", model, what, f"unchanged since publication: {len(files) - 1} files")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
